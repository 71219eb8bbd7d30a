"""One optimizer step in plain PyTorch: the losses of plain.py, and torch.optim."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.answers.plain import Plain
from flatout.engine.answers.verdict import ROUNDOFF
from flatout.engine.machine.runtime import Runtime, exact_products
from flatout.engine.parameters import SettingsError
from flatout.engine.train.optimizer import (
    NO_DECAY_DIMENSIONS,
    SGD_MOMENTUM,
    build_optimizer,
    set_learning_rate,
)
from flatout.engine.train.setup.assemble import seeded_model
from flatout.engine.train.setup.job import TrainJob

Weights = dict[str, Tensor]


@dataclass
class Step:
    """Figures of a step, on the CPU."""

    loss: float
    """Mean over the targets of the global batch."""
    targets: tuple[int, ...]
    """Numbers of targets, which must all be equal."""
    gradients: Weights
    """Of the parameters that received one, before clipping."""
    trained: frozenset[str]
    """Parameters that the optimizer has."""
    weights: Weights = field(default_factory=dict)
    ranks_agree: bool = True


@dataclass
class PlainStep:
    """The step in plain PyTorch, in fp32 and rounded like the run."""

    job: TrainJob
    model: Any
    before: Weights
    found: Step
    rounded: Step
    described: str

    @classmethod
    def of(cls, job: TrainJob, runtime: Runtime) -> PlainStep:
        model = _started(job)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        plain = Plain(
            model.to(runtime.device).train(),
            job.task,
            job.train,
            job.settings.max_length,
            job.vocabulary.pad_token_id if job.vocabulary else 0,
        )
        take = partial(_plain_step, plain, job.batches.rows(0))
        with exact_products():
            found = take(nullcontext)
        if roundoff_of(runtime) == ROUNDOFF["fp32"]:
            _change_last_bits(model)
        rounded = take(runtime.autocast)
        model.zero_grad(set_to_none=True)
        model = model.cpu()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        return cls(job, model, before, found, rounded, plain.described)

    def weights_after(self, gradients: Weights) -> Weights:
        """Return the weights after a step of torch.optim by `gradients`, clipped."""
        train, model = self.job.settings.train, self.model
        for name, parameter in model.named_parameters():
            own = gradients.get(name)
            parameter.grad = None if own is None else own.clone()  # it is clipped
        optimizer = _plain_optimizer(model, self.job)
        if train.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}


def _started(job: TrainJob) -> Any:
    """Return the model that the training starts from, with its parameters frozen.
    Raises SettingsError if it drops anything."""
    train = job.settings.train.model_copy(update={"freeze": []})
    settings = job.settings.model_copy(update={"train": train})
    model = seeded_model(replace(job, settings=settings))
    for pattern in job.settings.train.freeze:
        fits = re.compile(rf"(^|\.)({pattern})(\.|$)").search
        for name, parameter in model.named_parameters():
            if fits(name):
                parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if "drop" in type(module).__name__.lower() and getattr(module, "p", None):
            raise SettingsError(
                f"verify compares steps without dropout, and no key of the model's "
                f"config sets that of {name}: set it to 0 in the model's code"
            )
    return model


@torch.no_grad()
def _change_last_bits(model: nn.Module) -> None:
    """Multiply each weight by about 1 plus or minus the roundoff of fp32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape).to(parameter.device) * 2 - 1
            parameter.mul_(1 + signs * 2 * ROUNDOFF["fp32"])


def _plain_step(
    plain: Plain, rows: Any, precision: Callable[[], AbstractContextManager[Any]]
) -> Step:
    plain.model.zero_grad(set_to_none=True)
    loss, targets, divisor = 0.0, 0, 0.0
    with precision():
        for part in plain.parts(rows, 0):
            with torch.autocast(plain.model.device.type, enabled=False):
                part.loss.backward()  # type: ignore[no-untyped-call]
            loss, targets = loss + part.loss.item(), targets + part.targets
            divisor += part.divisor
    divisor = divisor or 1.0
    gradients = {
        name: p.grad.float().cpu() / divisor
        for name, p in plain.model.named_parameters()
        if p.grad is not None
    }
    trained = (n for n, p in plain.model.named_parameters() if p.requires_grad)
    return Step(loss / divisor, (targets,), gradients, frozenset(trained))


def _plain_optimizer(model: nn.Module, job: TrainJob) -> torch.optim.Optimizer:
    """Return AdamW or SGD of PyTorch; for any other, the run's own on this model."""
    train = job.settings.train
    rate = train.peak_learning_rate
    if train.optimizer not in ("adamw", "sgd"):
        optimizer = build_optimizer(model, train, fused=False, capturable=False)
        set_learning_rate(optimizer, rate)
        return optimizer
    groups: dict[bool, list[Tensor]] = {}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        groups.setdefault(parameter.dim() > NO_DECAY_DIMENSIONS, []).append(parameter)
    decayed = [
        {"params": own, "weight_decay": train.weight_decay * is_matrix}
        for is_matrix, own in groups.items()
    ]
    if train.optimizer == "sgd":
        momentum = SGD_MOMENTUM if train.momentum is None else train.momentum
        return torch.optim.SGD(decayed, lr=rate, momentum=momentum)
    betas, eps = (train.adam_beta1, train.adam_beta2), train.adam_epsilon
    return torch.optim.AdamW(decayed, lr=rate, betas=betas, eps=eps)


def roundoff_of(runtime: Runtime) -> float:
    """Return half the distance from 1 to the next number, in matrix products."""
    tf32 = runtime.is_cuda and torch.get_float32_matmul_precision() != "highest"
    name = "tf32" if tf32 and runtime.precision == "fp32" else runtime.precision
    return ROUNDOFF[name]
