"""One optimizer step of a configured training against the same step in plain fp32."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.answers.plain import Plain
from flatout.engine.answers.verdict import ROUNDOFF, Pair, Verdict, compare, floor_of
from flatout.engine.batches.collation import StepBatch
from flatout.engine.machine.runtime import Runtime
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.parameters import SettingsError
from flatout.engine.train.optimizer import (
    NO_DECAY_DIMENSIONS,
    SGD_MOMENTUM,
    Updater,
    build_optimizer,
    set_learning_rate,
)
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.setup.assemble import Trainer, assemble, build_model
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.planned import plan

OVERFLOWS = 20
"""Most steps of fp16 until its loss scale fits."""
Weights = dict[str, Tensor]


def verify(
    job: TrainJob, runtime: Runtime, group: ProcessGroup | None = None
) -> Verdict | None:
    """Take the first step of `job` without dropout, and compare it; the verdict is on
    the main rank. Nothing is written. Raises what a training raises at its start."""
    begin_s = time.perf_counter()
    job = without_dropout(job)
    plain = fault = None
    if runtime.ranks.is_main:
        try:
            with heartbeat.phase("evaluate"):
                plain = PlainStep.of(job, runtime)
        except RuntimeError as error:  # a training explains what a device cannot do
            fault = error
    trainer = assemble(job, runtime, group, partial(plan, job, runtime))
    if fault is not None:
        raise fault
    found = own_step(trainer, group)
    if plain is None:
        return None
    after = plain.weights_after(found.gradients)
    pair = Pair(found, plain.found, plain.rounded, plain.before, after)
    verdict = compare(pair, _facts(trainer, plain))
    return replace(verdict, seconds=time.perf_counter() - begin_s)


def _facts(trainer: Trainer, plain: PlainStep) -> dict[str, Any]:
    runtime, resolved = trainer.runtime, trainer.resolved
    step = (
        f"step 1 of {trainer.total_steps}: {trainer.data[0].num_samples} rows on "
        f"{runtime.device_name} x {runtime.ranks.world_size}, {runtime.precision}, "
        f"{resolved.strategy}, attention {resolved.attention}, compile "
        f"{resolved.compile}, graphs {resolved.cuda_graphs}"
    )
    noise = 2.0 if resolved.residual == "bf16" else 1.0
    floor = floor_of(runtime.precision, tf32=has_tf32(runtime))
    return {"step": step, "reference": plain.described, "floor": floor, "noise": noise}


def without_dropout(job: TrainJob) -> TrainJob:
    """Return the job with all dropout of its model's config at 0, no resume."""
    config = build_model(job, empty=True).config.to_dict()
    off = {
        name: 0.0
        for name, value in config.items()
        if "drop" in name and isinstance(value, float) and value
    }
    model, train = job.settings.model, job.settings.train
    key = "config" if model.name_or_path is None else "overrides"
    model = model.model_copy(update={key: {**getattr(model, key), **off}})
    train = train.model_copy(update={"resume": "never"})
    settings = job.settings.model_copy(update={"model": model, "train": train})
    return replace(job, settings=settings)


@dataclass
class Step:
    """Figures of a step, on the CPU."""

    loss: float
    """Mean over the targets of the global batch."""
    targets: tuple[int, ...]
    """Numbers of targets, which must all be equal."""
    divisor: float
    gradients: Weights
    """Of the parameters that received one, before clipping."""
    weights: Weights
    trained: frozenset[str] = frozenset()
    """Parameters that the optimizer has."""
    ranks_agree: bool = True
    finite: bool = True


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
        if runtime.precision == "fp32" and not has_tf32(runtime):
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.settings.runtime.seed)
        model = build_model(job)
    for pattern in job.settings.train.freeze:
        fits = re.compile(rf"(^|\.)({pattern})(\.|$)").search
        for name, parameter in model.named_parameters():
            if fits(name):
                parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if "drop" in type(module).__name__.lower() and getattr(module, "p", 0):
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
    return Step(loss / divisor, (targets,), divisor, gradients, {}, frozenset(trained))


def _plain_optimizer(model: nn.Module, job: TrainJob) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer; for those with groups or code of their own, the same
    one on the plain model."""
    train = job.settings.train
    rate = train.peak_learning_rate
    if train.layer_decay or train.optimizer not in ("adamw", "sgd", "adafactor"):
        optimizer = build_optimizer(model, train, fused=False, capturable=False)
        set_learning_rate(optimizer, rate)
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > NO_DECAY_DIMENSIONS]
    others = [p for p in trained if p.dim() <= NO_DECAY_DIMENSIONS]
    groups = [
        {"params": own, "weight_decay": decay}
        for own, decay in ((matrices, train.weight_decay), (others, 0.0))
        if own
    ]
    if train.optimizer == "sgd":
        momentum = SGD_MOMENTUM if train.momentum is None else train.momentum
        return torch.optim.SGD(groups, lr=rate, momentum=momentum)
    if train.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    betas, eps = (train.adam_beta1, train.adam_beta2), train.adam_epsilon
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps)


class NotedUpdater:
    """Stands for an updater and keeps copies of the gradients that it receives, also
    if a CUDA graph replays it."""

    def __init__(self, inner: Updater, named: Mapping[str, Tensor]) -> None:
        self.inner, self.named = inner, named
        self.optimizer, self.parameters = inner.optimizer, inner.parameters
        self.gradients = {n: torch.zeros_like(p.detach()) for n, p in named.items()}
        self.received: set[str] = set()

    def __call__(
        self, loss: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                self.received.add(name)
                own = parameter.grad if scale is None else parameter.grad / scale
                self.gradients[name].copy_(own)
        return self.inner(loss, scale)


def own_step(trainer: Trainer, group: ProcessGroup | None) -> Step:
    """Take the step of `trainer`, at the highest learning rate. All ranks call it."""
    named = {_plain_name(n): p for n, p in trainer.model.model.named_parameters()}
    held = {id(p) for p in trainer.stepper.updater.parameters}
    trained = {name: p for name, p in named.items() if id(p) in held}
    noted = NotedUpdater(trainer.stepper.updater, trained)
    trainer.stepper.updater = noted  # type: ignore[assignment]
    set_learning_rate(trainer.optimizer, trainer.job.settings.train.peak_learning_rate)
    batch = trainer.data[0]
    _launch(trainer, batch.to(trainer.runtime.device), named)
    sums = trainer.stepper.sums
    task = trainer.job.task
    here = sum(int(task.real(m.labels).sum()) for m in batch.micro_batches)
    weights = {n: _whole(p.detach()).float().cpu() for n, p in named.items()}
    digest = sum(float(w.double().sum()) for w in weights.values())
    mine = (sums.last_loss.item(), here, digest)
    ranks = group.all_gather(mine) if group else [mine]
    return Step(
        loss=sum(loss for loss, _, _ in ranks),
        targets=(sum(count for _, count, _ in ranks), batch.num_targets),
        divisor=float(batch.divisor),
        gradients={
            name: _whole(gradient).float().cpu()
            for name, gradient in noted.gradients.items()
            if name in noted.received
        },
        weights=weights,
        trained=frozenset(trained),
        ranks_agree=len({digest for _, _, digest in ranks}) == 1,
        finite=bool(torch.isfinite(sums.last_norm)),
    )


def _launch(trainer: Trainer, batch: StepBatch, named: Mapping[str, Tensor]) -> None:
    """Run the step; with CUDA graphs as a replay, with fp16 until its scale fits."""
    stepper = trainer.stepper
    before = {name: p.detach().clone() for name, p in named.items()}
    stepper(batch)
    if trainer.resolved.cuda_graphs:  # each shape runs once before it is recorded
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(before[name])
            for state in trainer.optimizer.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    value.zero_()
        stepper(batch)
    for _ in range(OVERFLOWS):
        if stepper.scaler is None or bool(torch.isfinite(stepper.sums.last_norm)):
            break
        stepper(batch)


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _whole(tensor: Any) -> Tensor:
    """Return all of a tensor whose parts are on several ranks; all ranks call it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def has_tf32(runtime: Runtime) -> bool:
    return runtime.is_cuda and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products in fp32, without TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
