"""The training loop. `train()` runs the steps, evaluates the model and saves it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.engine.batches.collation import StepBatch
from flatout.engine.batches.loader import StepLoader
from flatout.engine.checkpoints.resume import check_identity, find_checkpoint
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.adapters import has_adapter
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.rows.rows import SplitRows
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.keeping.oom import evaluate_within_memory, shrink
from flatout.engine.train.keeping.session import Session
from flatout.engine.train.optimizer import (
    check_schedule,
    learning_rate,
    set_learning_rate,
)
from flatout.engine.train.own_figures import OwnMetrics, check_metric
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.recording.audit import write_audit
from flatout.engine.train.recording.progress import Progress, evaluation_due
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.recording.report import Evaluation, LogPoint, TrainReport
from flatout.engine.train.recording.summary import build_report, resolved_parameters
from flatout.engine.train.recording.timing import compile_clock
from flatout.engine.train.setup.acceleration import plan
from flatout.engine.train.setup.assemble import Trainer, assemble
from flatout.engine.train.setup.identity import equal_on_all_ranks, identity
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.step_data import make_collator, make_planner

logger = logging.getLogger(__name__)

ROWS_TRIED = 256
"""The number of validation rows on which custom metrics are tested before training."""


@dataclass
class TrainResult:
    """The result of a run, on the main rank."""

    model_folder: Path
    """The folder of the model with the best value of `train.metric` on the validation
    split."""
    last_model_folder: Path
    report: TrainReport
    history: list[LogPoint]
    trust_remote_code: bool = False
    """Whether loading the model may run custom code from its folder."""

    @property
    def model(self) -> Any:
        return self._load(self.model_folder)

    @property
    def last_model(self) -> Any:
        return self._load(self.last_model_folder)

    def _load(self, folder: Path) -> Any:
        trusts = self.trust_remote_code
        return load_pretrained(folder, trust_remote_code=trusts, merge=False)


def train(
    job: TrainJob, runtime: Runtime, group: ProcessGroup | None = None
) -> TrainResult:
    """Run `job` on this rank. Raises SettingsError, ModelError or CheckpointError if
    the run cannot start, NonFiniteError or OutOfMemory if a step fails, SaveError if
    the last model cannot be saved, and Interrupted if a signal stopped the run."""
    begin_s = time.perf_counter()
    compile_clock.listen()
    if group:
        group.check_equal(equal_on_all_ranks(job))
    if found := find_checkpoint(job.settings.train.resume, job.work_folder):
        # Check before loading the model. The session checks again when it resumes.
        check_identity(found.folder, found.manifest, identity(job), log=False)
    trainer = assemble(job, runtime, group, partial(plan, job, runtime))
    announce(trainer)
    try_own_parts(trainer)
    recorder = Recorder(trainer, begin_s, progress=Progress(trainer))
    with Session(trainer, recorder, group) as session:
        loader = start_or_resume(trainer, recorder, session)
        for batch in loader:
            try:
                lr = take_step(trainer, recorder, batch, loader.wait_s)
            except (RuntimeError, MemoryError) as error:
                shrink(trainer, error, batch.step)
                loader.restart(trainer.data, batch.step)
                continue
            after_step(trainer, recorder, session, batch, lr)
            if batch.step + 1 == trainer.total_steps:
                break  # early stopping
        test = finish(trainer, recorder, session)
    end = {**test.named("test"), "model": str(session.best_model)}
    recorder.notify("end", trainer.total_steps, end)
    return TrainResult(
        model_folder=session.best_model,
        last_model_folder=session.last_model,
        report=build_report(recorder, loader, test),
        history=recorder.history,
        trust_remote_code=job.settings.model.trust_remote_code,
    )


def start_or_resume(
    trainer: Trainer, recorder: Recorder, session: Session
) -> StepLoader:
    """Restore the newest checkpoint, if any. Return a loader for the remaining
    steps."""
    start_step = session.resume()
    if recorder.lost_patience:  # killed after the last step, before writing results
        recorder.end_at(start_step)
    loader = StepLoader(
        trainer.data,
        trainer.job.settings.train.loader,
        trainer.runtime,
        start_step,
        trainer.total_steps,
    )
    trainer.model.train()
    if trainer.stepper.audit is not None:
        trainer.stepper.audit.sums.zero_()  # passes that measure memory add to them
    recorder.start(start_step, loader)
    recorder.metrics.note_resolved(start_step, resolved_parameters(trainer))
    return loader


def take_step(
    trainer: Trainer, recorder: Any, batch: StepBatch, wait_s: float
) -> float:
    """Run one step of training or of a benchmark. Return its learning rate. `recorder`
    is a Recorder or another object with its methods `step_begins` and `step_ends`.
    `wait_s` is the time in seconds for which the host waited for `batch`."""
    total = trainer.total_steps
    lr = learning_rate(trainer.job.settings.train, batch.step % total, total)
    set_learning_rate(trainer.optimizer, lr)
    recorder.step_begins()
    trainer.stepper(batch)
    recorder.step_ends(batch, wait_s, lr)
    return lr


def after_step(
    trainer: Trainer,
    recorder: Recorder,
    session: Session,
    batch: StepBatch,
    lr: float,
) -> None:
    """After a step on `batch`, log metrics, evaluate the model and save a checkpoint if
    they are due. Raises Interrupted if a signal was received, and NonFiniteError if a
    loss or gradient was not finite."""
    done = batch.step + 1
    if recorder.log_due(done):
        recorder.log(batch, lr)
    if evaluation_due(trainer, done):
        validate(trainer, recorder, session, done)
        if recorder.lost_patience:
            if not recorder.log_due(done):
                recorder.log(batch, lr)
            recorder.end_at(done)
    session.step_done(done)


def validate(trainer: Trainer, recorder: Recorder, session: Session, done: int) -> None:
    """Evaluate the model on the validation split after `done` steps. If the result is
    the best so far, save the model."""
    with recorder.paused("evaluate"):
        result = evaluate_split(trainer, trainer.job.validation)
    if recorder.note_validation(done, result):
        with recorder.paused("checkpoint"):
            session.keep_best(done, result)


def announce(trainer: Trainer) -> None:
    """Log how the run will be computed, and reasons for fallbacks."""
    runtime, resolved = trainer.runtime, trainer.resolved
    if not runtime.ranks.is_main:
        return
    if has_adapter(trainer.model.model):
        sizes = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
        logger.info(
            "an adapter: %s of %s weights are trained",
            f"{sum(size for size, trained in sizes if trained):,}",
            f"{sum(size for size, _ in sizes):,}",
        )
    logger.info("training on %s", trainer.described)
    batch = trainer.job.settings.train.global_batch_size
    logger.info(
        "%d steps of %d samples, token budget %d",
        *(trainer.total_steps, batch, resolved.token_budget),
    )
    for reason in filter(None, (resolved.budget_reason, resolved.compile_reason)):
        logger.info(reason)
    for note in resolved.notes:
        logger.warning(note)


def try_own_parts(trainer: Trainer) -> None:
    """Test the custom schedule, metrics and task, if there are any, before the first
    step. Raises SettingsError if one of them fails or returns an invalid value."""
    train, task = trainer.job.settings.train, trainer.job.task
    check_schedule(train, trainer.total_steps)
    own = OwnMetrics.of(train, task, tried=True)
    if own or is_own(task.settings.task):
        found = evaluate_split(trainer, trainer.job.validation, own, ROWS_TRIED)
        check_metric(train, task, found.metrics)


def evaluate_split(
    trainer: Trainer,
    rows: SplitRows,
    own: OwnMetrics | None = None,
    most_rows: int | None = None,
) -> Evaluation:
    """Evaluate all `rows`, or at most `most_rows` of them, within the available memory.
    `own` contains custom metrics, by default those of the job."""
    job, runtime, model = trainer.job, trainer.runtime, trainer.model
    own = own or OwnMetrics.of(job.settings.train, job.task)

    def found(budget: int) -> Evaluation:
        resolved = replace(trainer.resolved, token_budget=budget)
        planner = make_planner(job, runtime, resolved)
        collator = make_collator(job, runtime, resolved, model.model.config)
        # Code compiled for training cannot be reused, and recompiling takes too long.
        with torch.compiler.set_stance("force_eager"):
            return evaluate(model, rows, planner, collator, runtime, own, most_rows)

    return evaluate_within_memory(trainer, rows, found)


def finish(trainer: Trainer, recorder: Recorder, session: Session) -> Evaluation:
    """Save the last model. Return the best model's evaluation on the test split."""
    if (audit := trainer.stepper.audit) is not None:
        ranks = trainer.runtime.ranks
        with recorder.paused("audit"):
            sums = audit.gathered(ranks.world_size)
            if ranks.is_main:
                write_audit(trainer.job, sums)
    with recorder.paused("checkpoint"):
        session.end_with_best()
    with recorder.paused("evaluate"):
        test = evaluate_split(trainer, trainer.job.test)
    recorder.metrics.write(trainer.total_steps, test.named("test"))
    return test
