"""Compare the first optimizer step of a run with the same step in plain PyTorch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from flatout.engine.answers.plain import roundoff_of
from flatout.engine.answers.plain_step import PlainStep, Step
from flatout.engine.answers.verdict import TIMES, Verdict, compare
from flatout.engine.batches.collation import StepBatch
from flatout.engine.checkpoints.shards import whole_tensor
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
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        if processes == 1:
            verify(job, set_up(job.settings.runtime), None, folder)
        else:
            work = f"{__name__}:{verify.__name__}"
            write_spec(job, processes, folder, work=work)
            if error := Attempt(job, processes, folder).run():
                raise error
        return TypeAdapter(Verdict).validate_json((folder / VERDICT).read_bytes())


def verify(
    job: TrainJob,
    runtime: Runtime,
    group: ProcessGroup | None = None,
    folder: Path | None = None,
) -> Verdict | None:
    """Compute the first step of `job` without dropout and compare it with the same step
    in plain PyTorch. The main rank returns the verdict, and writes it to the file
    VERDICT if there is a `folder`. All others return None. Raises SettingsError if the
    plain step does not fit in memory, and any error with which the run fails to
    start."""
    job = without_dropout(job)
    trainer = assemble(job, runtime, group, partial(plan, job, runtime))
    plain = _plain_step(job, runtime) if runtime.ranks.is_main else None
    found = own_step(trainer, group)
    if plain is None:
        return None
    times = TIMES * (2.0 if trainer.resolved.residual == "bf16" else 1.0)
    judged = compare(plain, found, roundoff_of(runtime), times)
    count, total = trainer.data[0].num_samples, trainer.total_steps
    step = f"step 1 of {total}: {count} rows on {trainer.described}"
    verdict = Verdict(step, plain.described, *judged)
    if folder:
        (folder / VERDICT).write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    return verdict


def _plain_step(job: TrainJob, runtime: Runtime) -> PlainStep:
    try:
        with heartbeat.phase("evaluate"):
            return PlainStep(job, runtime)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(
            "verify: the plain step in fp32 does not fit this device's memory; verify "
            "with a smaller train.global_batch_size or tokenize.max_length"
        ) from error


def without_dropout(job: TrainJob) -> TrainJob:
    """Return a copy of `job` that uses no dropout and does not resume a checkpoint."""
    model, config = job.settings.model, build_model(job, empty=True).config.to_dict()
    rates = {n for n, v in config.items() if "drop" in n and isinstance(v, float)}
    key = "config" if model.name_or_path is None else "overrides"
    off = {f"model.{key}": getattr(model, key) | dict.fromkeys(rates, 0.0)}
    return job.changed({**off, "model.lora.dropout": 0.0, "train.resume": "never"})


class NotedUpdater(Updater):
    """Replaces an updater and copies the gradients of the parameters `named` before
    clipping. The copies are also made if a CUDA graph replays the update."""

    def __init__(self, inner: Updater, named: Mapping[str, Tensor]) -> None:
        vars(self).update(vars(inner))
        self.named, self.gradients = named, dict[str, Tensor]()

    def __call__(
        self, loss: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                own = parameter.grad if scale is None else parameter.grad / scale
                self.gradients.setdefault(name, torch.empty_like(own)).copy_(own)
        return super().__call__(loss, scale)


def own_step(trainer: Trainer, group: ProcessGroup | None) -> Step:
    """Run the first step of `trainer` at the peak learning rate and return its results.
    All ranks must call this function."""
    trained = {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in trainer.model.model.named_parameters()
        if parameter.requires_grad
    }
    noted = NotedUpdater(trainer.stepper.updater, trained)
    trainer.stepper.updater = noted
    batch, real = trainer.data[0], trainer.job.task.real
    _launch(trainer, batch.to(trainer.runtime.device))
    here = sum(int(real(micro["labels"]).sum()) for micro in batch.micro_batches)
    weights = _whole(trained)
    digest = sum(float(w.double().sum()) for w in weights.values())
    mine = (trainer.stepper.sums.last_loss.item(), here, digest)
    ranks = group.all_gather(mine) if group else [mine]
    losses, counts, digests = zip(*ranks, strict=True)
    return Step(
        loss=sum(losses),
        targets=(sum(counts), batch.num_targets),
        gradients=_whole(noted.gradients),
        weights=weights,
        ranks_agree=len({*digests}) == 1,
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
    for _ in range(1 + OVERFLOWS):
        stepper(batch)
        if stepper.scaler is None or bool(torch.isfinite(stepper.sums.last_norm)):
            break


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` in fp32 on the CPU, gathered from all ranks if they are sharded.
    All ranks must call this function."""
    return {name: whole_tensor(t).float().cpu() for name, t in tensors.items()}
