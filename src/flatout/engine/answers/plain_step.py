"""The first optimizer step of a run in plain PyTorch, with the losses of plain.py."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.answers.plain import FP32, Plain
from flatout.engine.machine.runtime import Runtime
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
    computed twice: `exact` in fp32, and `rounded` in the precision of the run."""

    def __init__(self, job: TrainJob, runtime: Runtime) -> None:
        """Compute both steps. Raises SettingsError if the model uses dropout."""
        self._job, self._model = job, _started(job)
        named = self._model.named_parameters()
        self.trained = {name for name, p in named if p.requires_grad}
        module = deepcopy(self._model).to(runtime.device).train()
        plain = Plain(module, job.task, job.train, job.max_length)
        self.described = plain.described
        steps = plain.in_both_precisions(runtime, lambda: self._step(plain))
        self.exact, self.rounded = steps

    def _step(self, plain: Plain) -> Step:
        loss, targets, divisor = plain.backward(self._job.batches.rows(0))
        gradients = {
            name: p.grad.float().cpu() / divisor
            for name, p in plain.model.named_parameters()
            if p.grad is not None
        }
        return Step(loss, (targets,), gradients)

    def changes(self, found: Step) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the change of each weight in the step `found`, the change that a
        torch.optim optimizer makes with the same gradients, and this change with the
        rounding error of the weight in fp32."""
        model, train = deepcopy(self._model), self._job.settings.train
        before, after = (dict(m.named_parameters()) for m in (self._model, model))
        for name, gradient in found.gradients.items():
            after[name].grad = gradient.clone()  # clipped below
        if train.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        _optimizer(model, self._job).step()
        for name, weights in found.weights.items():
            old, new = before[name].detach(), after[name].detach()
            yield weights - old, new - old, new - old + FP32 * old


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


def _optimizer(model: nn.Module, job: TrainJob) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW or SGD, or an instance of a custom optimizer. Momentum and
    the betas do not affect the first step."""
    train = job.settings.train
    rate, decay = train.peak_learning_rate, train.weight_decay
    if train.optimizer not in ("adamw", "sgd"):
        return build_optimizer(model, train, fused=False, capturable=False)
    groups = [
        {"params": [p], "weight_decay": decay if p.dim() > NO_DECAY_DIMENSIONS else 0.0}
        for p in model.parameters()
        if p.requires_grad
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, eps=train.adam_epsilon)
