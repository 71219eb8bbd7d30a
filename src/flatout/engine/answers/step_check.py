"""Compare the first optimizer step of a run with the same step in plain PyTorch."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
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
from flatout.engine.launch.launch import resolve_processes, write_spec
from flatout.engine.launch.supervisor import Attempt
from flatout.engine.machine.environment import launched_from_outside
from flatout.engine.machine.runtime import Runtime, set_up
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.models.model import is_out_of_memory
from flatout.engine.parameters import SettingsError
from flatout.engine.train.optimizer import Updater, set_learning_rate
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.setup.acceleration import plan
from flatout.engine.train.setup.assemble import Trainer, assemble, build_model
from flatout.engine.train.setup.job import TrainJob

RANK = "flatout.engine.answers.rank"
VERDICT = "verdict.json"
OVERFLOWS = 20
"""The maximum number of times that an fp16 step is repeated to avoid overflow."""


def verify_job(job: TrainJob) -> Verdict:
    """Compare the first step of `job` with plain PyTorch, with one process per device.
    Raises SettingsError if several machines are configured, and any error with which
    the run fails to start."""
    distributed = job.settings.train.distributed
    if launched_from_outside() or distributed.num_machines > 1:
        raise SettingsError(
            "verify runs on one machine and starts its ranks: give it "
            "train.distributed.num_machines=1, without torchrun, accelerate or srun"
        )
    processes = resolve_processes(distributed)
    if processes == 1:
        verdict = verify(job, set_up(job.settings.runtime))
        assert verdict is not None  # noqa: S101 - the only rank is the main one
        return verdict
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        write_spec(job, processes, folder)
        if error := Attempt(job, processes, folder, RANK).run():
            raise error
        return Verdict.from_json(json.loads((folder / VERDICT).read_text("utf-8")))


def verify(
    job: TrainJob, runtime: Runtime, group: ProcessGroup | None = None
) -> Verdict | None:
    """Compute the first step of `job` without dropout and compare it with the same step
    in plain PyTorch. Return the verdict on the main rank and None on all others. No
    files are written. Raises SettingsError if the plain step does not fit in memory,
    and any error with which the run fails to start."""
    begin_s = time.perf_counter()
    job = without_dropout(job)
    plain = fault = None
    if runtime.ranks.is_main:
        try:
            with heartbeat.phase("evaluate"):
                plain = PlainStep(job, runtime)
        except RuntimeError as error:  # starting the run may raise a clearer error
            fault = error
    trainer = assemble(job, runtime, group, partial(plan, job, runtime))
    if fault is not None:
        if not is_out_of_memory(fault):
            raise fault
        raise SettingsError(
            "verify: the plain step in fp32 does not fit this device's memory; verify "
            "with a smaller train.global_batch_size or tokenize.max_length"
        ) from fault
    found = own_step(trainer, group)
    if plain is None:
        return None
    times = TIMES * (2.0 if trainer.resolved.residual == "bf16" else 1.0)
    judged = compare(plain, found, _change(plain, found), roundoff_of(runtime), times)
    seconds = time.perf_counter() - begin_s
    count, total = trainer.data[0].num_samples, trainer.total_steps
    step = f"step 1 of {total}: {count} rows on {trainer.described}"
    return Verdict(step, plain.described, *judged, seconds)


def _change(plain: PlainStep, found: Step) -> Check:
    """Compare the weight change of the step `found` with the change that a torch.optim
    optimizer makes with the same gradients, up to a few fp32 rounding errors."""
    after = plain.weights_after(found.gradients)
    before = {name: plain.before[name] for name in found.weights}
    own = [found.weights[name] - w for name, w in before.items()]
    theirs = [after[name] - w for name, w in before.items()]
    few_bits = TIMES * ROUNDOFF["fp32"]
    pairs = zip(theirs, before.values(), strict=True)
    rounded = [change + few_bits * w for change, w in pairs]
    return compared("change of weights", own, theirs, rounded, 1e-3, times=1.0)


def without_dropout(job: TrainJob) -> TrainJob:
    """Return a copy of `job` that uses no dropout and does not resume a checkpoint."""
    config = build_model(job, empty=True).config.to_dict()
    off = {
        name: 0.0
        for name, value in config.items()
        if "drop" in name and isinstance(value, float) and value
    }
    model = job.settings.model
    key = "config" if model.name_or_path is None else "overrides"
    return job.changed(
        {
            f"model.{key}": {**getattr(model, key), **off},
            "model.lora.dropout": 0.0,
            "train.resume": "never",
        }
    )


class NotedUpdater:
    """Wraps an updater and copies the gradients that are passed to it. The copies are
    also made if the update is replayed as part of a CUDA graph."""

    def __init__(self, inner: Updater, named: Mapping[str, Tensor]) -> None:
        self.inner, self.named = inner, named
        self.optimizer, self.parameters = inner.optimizer, inner.parameters
        self.gradients: dict[str, Tensor] = {}

    def __call__(
        self, loss: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                own = parameter.grad if scale is None else parameter.grad / scale
                kept = self.gradients.setdefault(name, torch.empty_like(own))
                kept.copy_(own)
        return self.inner(loss, scale)


def own_step(trainer: Trainer, group: ProcessGroup | None) -> Step:
    """Run the first step of `trainer` at the peak learning rate and return its results.
    All ranks must call this function."""
    held = {id(p) for p in trainer.stepper.updater.parameters}
    trained = {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in trainer.model.model.named_parameters()
        if id(parameter) in held
    }
    noted = NotedUpdater(trainer.stepper.updater, trained)
    trainer.stepper.updater = noted  # type: ignore[assignment]
    batch = trainer.data[0]
    _launch(trainer, batch.to(trainer.runtime.device))
    task = trainer.job.task
    here = sum(int(task.real(m["labels"]).sum()) for m in batch.micro_batches)
    weights = {n: _whole(p.detach()) for n, p in trained.items()}
    digest = sum(float(w.double().sum()) for w in weights.values())
    mine = (trainer.stepper.sums.last_loss.item(), here, digest)
    ranks = group.all_gather(mine) if group else [mine]
    return Step(
        loss=sum(loss for loss, _, _ in ranks),
        targets=(sum(count for _, count, _ in ranks), batch.num_targets),
        gradients={n: _whole(g) for n, g in noted.gradients.items()},
        weights=weights,
        ranks_agree=len({digest for _, _, digest in ranks}) == 1,
    )


def _launch(trainer: Trainer, batch: StepBatch) -> None:
    """Run the step on `batch`. If CUDA graphs are used, first run it with a learning
    rate of 0, because the graph is captured when a shape recurs. In fp16, the step is
    repeated while gradients overflow, at most OVERFLOWS times."""
    stepper, optimizer = trainer.stepper, trainer.optimizer
    if trainer.resolved.cuda_graphs:  # each shape runs once before it is captured
        set_learning_rate(optimizer, 0.0)
        stepper(batch)
        for state in optimizer.state.values():
            for value in filter(torch.is_tensor, state.values()):
                value.zero_()
    set_learning_rate(optimizer, trainer.job.settings.train.peak_learning_rate)
    stepper(batch)
    for _ in range(OVERFLOWS):
        if stepper.scaler is None or bool(torch.isfinite(stepper.sums.last_norm)):
            break
        stepper(batch)


def _whole(tensor: Any) -> Tensor:
    """Gather `tensor` if it is sharded and return it in fp32 on the CPU. All ranks must
    call this function."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.float().cpu()
