"""One optimizer step of a configured training against the same step in plain fp32."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.engine.answers.plain_step import PlainStep, Step, roundoff_of
from flatout.engine.answers.verdict import (
    ROUNDOFF,
    TIMES,
    Check,
    Verdict,
    compare,
    compared,
)
from flatout.engine.batches.collation import StepBatch
from flatout.engine.machine.runtime import Runtime
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.models.model import is_out_of_memory
from flatout.engine.parameters import SettingsError
from flatout.engine.train.optimizer import Updater, set_learning_rate
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.setup.assemble import Trainer, assemble, build_model
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.planned import plan

OVERFLOWS = 20
"""Most steps of fp16 until its loss scale fits."""


def verify(
    job: TrainJob, runtime: Runtime, group: ProcessGroup | None = None
) -> Verdict | None:
    """Compute the first step of `job` without dropout, and compare it. Return the
    verdict on the main rank, None on others. Writes no file. Raises SettingsError and
    the other errors of a training's start."""
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
    if fault is not None and is_out_of_memory(fault):
        raise SettingsError(
            "verify: the plain step in fp32 does not fit this device's memory; verify "
            "with a smaller train.global_batch_size or tokenize.max_length"
        ) from fault
    if fault is not None:
        raise fault
    found = own_step(trainer, group)
    if plain is None:
        return None
    change = _change(trainer, plain, found)
    times = TIMES * (2.0 if trainer.resolved.residual == "bf16" else 1.0)
    judged = compare(plain, found, change, roundoff_of(runtime), times)
    seconds = time.perf_counter() - begin_s
    return Verdict(_summary(trainer), plain.described, *judged, seconds)


def _change(trainer: Trainer, plain: PlainStep, found: Step) -> Check:
    """Compare the change of weights with that of a plain update by the same gradients,
    both in the types in which the training has them. What fp32 rounds is tolerated."""
    named = trainer.model.model.named_parameters()
    types = {_plain_name(name): parameter.dtype for name, parameter in named}
    after = plain.weights_after(found.gradients)
    before = {n: w.to(types[n]).float() for n, w in plain.before.items()}
    own = [found.weights[n] - w for n, w in before.items()]
    theirs = [after[n].to(types[n]).float() - w for n, w in before.items()]
    rounded = [
        c + TIMES * ROUNDOFF["fp32"] * w
        for c, w in zip(theirs, before.values(), strict=True)
    ]
    return compared("change of weights", own, theirs, rounded, 1e-3, times=1.0)


def _summary(trainer: Trainer) -> str:
    runtime, resolved = trainer.runtime, trainer.resolved
    return (
        f"step 1 of {trainer.total_steps}: {trainer.data[0].num_samples} rows on "
        f"{runtime.device_name} x {runtime.ranks.world_size}, {runtime.precision}, "
        f"{resolved.strategy}, attention {resolved.attention}, compile "
        f"{resolved.compile}, graphs {resolved.cuda_graphs}"
    )


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
    lora = model.lora.model_copy(update={"dropout": 0.0})
    changed = {key: {**getattr(model, key), **off}, "lora": lora}
    model = model.model_copy(update=changed)
    train = train.model_copy(update={"resume": "never"})
    settings = job.settings.model_copy(update={"model": model, "train": train})
    return replace(job, settings=settings)


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
        gradients={
            name: _whole(gradient).float().cpu()
            for name, gradient in noted.gradients.items()
            if name in noted.received
        },
        weights=weights,
        trained=frozenset(trained),
        ranks_agree=len({digest for _, _, digest in ranks}) == 1,
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
