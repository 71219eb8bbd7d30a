"""The first optimizer step of a run in plain PyTorch, with the losses of plain.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.answers.plain import Plain
from flatout.engine.answers.verdict import ROUNDOFF
from flatout.engine.machine.runtime import Runtime, exact_products
from flatout.engine.models.adapters import freeze
from flatout.engine.parameters import SettingsError
from flatout.engine.train.optimizer import NO_DECAY_DIMENSIONS, build_optimizer
from flatout.engine.train.setup.assemble import seeded_model
from flatout.engine.train.setup.job import TrainJob

Weights = dict[str, Tensor]


@dataclass
class Step:
    """The results of an optimizer step, with all tensors on the CPU."""

    loss: float
    """The mean loss over the targets of the global batch."""
    targets: tuple[int, ...]
    """The number of targets, counted in several ways. All counts must be equal."""
    gradients: Weights
    """The unclipped gradients, by name, of parameters that received a gradient."""
    weights: Weights = field(default_factory=dict)
    """The weights after the step, by name, of parameters that the optimizer updates."""
    ranks_agree: bool = True


class PlainStep:
    """The losses and gradients of the first step of `job` in plain PyTorch. The step is
    computed twice: `found` in fp32, and `rounded` in the precision of the run."""

    def __init__(self, job: TrainJob, runtime: Runtime) -> None:
        """Compute both steps. Raises SettingsError if the model uses dropout."""
        self._job, self.model = job, _started(job)
        self.before = _weights(self.model)
        named = self.model.named_parameters()
        self.trained = {name for name, p in named if p.requires_grad}
        module = self.model.to(runtime.device).train()
        plain = Plain(module, job.task, job.train, job.settings.max_length)
        self.described = plain.described
        with exact_products():
            self.found = self._step(plain)
        if roundoff_of(runtime) == ROUNDOFF["fp32"]:
            _change_last_bits(module)
        with runtime.autocast():
            self.rounded = self._step(plain)
        module.zero_grad(set_to_none=True)
        module.cpu()

    def _step(self, plain: Plain) -> Step:
        loss, targets, divisor = plain.backward(self._job.batches.rows(0))
        gradients = {
            name: p.grad.float().cpu() / divisor
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        return Step(loss / divisor, (targets,), gradients)

    def weights_after(self, gradients: Weights) -> Weights:
        """Return the weights after a step of a torch.optim optimizer with `gradients`.
        They are clipped first if `train.max_grad_norm` is set."""
        train = self._job.settings.train
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.before[name])
                own = gradients.get(name)
                parameter.grad = None if own is None else own.clone()  # clipped below
        optimizer = _optimizer(self.model, self._job)
        if train.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.max_grad_norm)
        optimizer.step()
        return _weights(self.model)


def _weights(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _started(job: TrainJob) -> Any:
    """Return the model with which training begins, and freeze its parameters according
    to `train.freeze`. Raises SettingsError if the model uses dropout."""
    model = seeded_model(job)
    freeze(model, job.settings.train.freeze)
    for name, module in model.named_modules():
        if "drop" in type(module).__name__.lower() and getattr(module, "p", None):
            raise SettingsError(
                f"verify compares steps without dropout, and no key of the model's "
                f"config sets that of {name}: set it to 0 in the model's code"
            )
    return model


@torch.no_grad()
def _change_last_bits(model: nn.Module) -> None:
    """Multiply each weight randomly by 1 plus or minus twice fp32's unit roundoff."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape).to(parameter.device) * 2 - 1
            parameter.mul_(1 + signs * 2 * ROUNDOFF["fp32"])


def _optimizer(model: nn.Module, job: TrainJob) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW or SGD, or an instance of a custom optimizer. Momentum and
    the betas do not affect the first step."""
    train = job.settings.train
    rate = train.peak_learning_rate
    if train.optimizer not in ("adamw", "sgd"):
        return build_optimizer(model, train, fused=False, capturable=False)
    decays = {True: train.weight_decay, False: 0.0}
    groups = [
        {"params": [p], "weight_decay": decays[p.dim() > NO_DECAY_DIMENSIONS]}
        for p in model.parameters()
        if p.requires_grad
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, eps=train.adam_epsilon)


def roundoff_of(runtime: Runtime) -> float:
    """Return the unit roundoff of matmuls in the run's precision, or in TF32 if it is
    enabled."""
    tf32 = runtime.is_cuda and torch.get_float32_matmul_precision() != "highest"
    name = "tf32" if tf32 and runtime.precision == "fp32" else runtime.precision
    return ROUNDOFF[name]
