"""train(): the one long readable function, and the phases beside its steps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.engine.assemble import Trainer, assemble
from flatout.engine.building import load_pretrained
from flatout.engine.evaluate import evaluate
from flatout.engine.job import TrainJob
from flatout.engine.jobs.distributed import Team
from flatout.engine.jobs.identity import agreed
from flatout.engine.jobs.oom import shrink
from flatout.engine.jobs.session import Session
from flatout.engine.loader import StepLoader
from flatout.engine.optim import learning_rate, set_learning_rate
from flatout.engine.progress import Progress, evaluation_due
from flatout.engine.recorder import Recorder
from flatout.engine.report import Evaluation, LogPoint, TrainReport
from flatout.engine.runtime import Runtime
from flatout.engine.step_data import make_collator, make_planner
from flatout.engine.summary import build_report, settled
from flatout.engine.timing import compile_clock
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)


@dataclass
class TrainResult:
    """What a run gives back on the main rank."""

    model_folder: Path
    """The best model by validation loss, `save_pretrained`."""
    last_model_folder: Path
    report: TrainReport
    history: list[LogPoint]
    confusion: list[list[int]]
    """On the test split: confusion[true][predicted]; empty without classes."""

    @property
    def model(self) -> Any:
        return load_pretrained(self.model_folder)

    @property
    def last_model(self) -> Any:
        return load_pretrained(self.last_model_folder)


def train(job: TrainJob, runtime: Runtime, team: Team | None = None) -> TrainResult:
    """Train `job` on this rank, together with those of `team`. Raises SettingsError,
    ModelError, CheckpointError, NonFiniteError, OutOfMemory, Interrupted."""
    begin_s = time.perf_counter()
    compile_clock.listen()
    if team:
        team.check_equal(agreed(job))
    trainer = assemble(job, runtime, team)
    announce(trainer)
    recorder = Recorder(trainer, begin_s)
    with (
        Session(trainer, recorder, team) as session,
        Progress(trainer) as recorder.progress,
    ):
        start_step, total_steps = session.resume(), trainer.total_steps
        loader = StepLoader(
            trainer.data, job.settings.train.loader, runtime, start_step, total_steps
        )
        trainer.model.train()
        recorder.start(start_step)
        recorder.metrics.note_settled(start_step, settled(trainer))
        for batch in loader:
            rate = learning_rate(job.settings.train, batch.step, total_steps)
            set_learning_rate(trainer.optimizer, rate)
            recorder.step_begins()
            try:
                trainer.stepper(batch)
            except (RuntimeError, MemoryError) as error:
                shrink(trainer, error, batch.step)
                loader.restart(trainer.data, batch.step)
                continue
            recorder.step_ends(batch, loader.wait_s, rate)
            done = batch.step + 1
            if recorder.log_due(done):
                recorder.log(batch, rate)
            if evaluation_due(trainer, done):
                with recorder.paused("evaluate"):
                    result = evaluate_split(trainer, job.validation)
                if recorder.note_validation(done, result):
                    with recorder.paused("checkpoint"):
                        session.keep_best(done, result)
            session.step_done(done)
        test = finish(trainer, recorder, session)
    return TrainResult(
        model_folder=session.best_model,
        last_model_folder=session.last_model,
        report=build_report(recorder, loader, test, "finished"),
        history=recorder.history,
        confusion=test.confusion,
    )


def announce(trainer: Trainer) -> None:
    """Say what really runs: kernel, type, fallbacks."""
    runtime, choices = trainer.runtime, trainer.choices
    if not runtime.ranks.is_main:
        return
    logger.info(
        "training on %s x %d: %s (residual stream %s), strategy %s, attention %s, "
        "compile %s, graphs %s%s",
        runtime.device_name,
        runtime.ranks.world_size,
        runtime.precision,
        choices.residual,
        choices.strategy,
        choices.attention,
        choices.compile,
        choices.cuda_graphs,
        ", gradients exchanged at once" if choices.exchange_at_once else "",
    )
    logger.info(
        "%d steps of %d samples, token budget %d, %d threads",
        trainer.total_steps,
        trainer.job.settings.train.global_batch_size,
        choices.token_budget,
        runtime.threads,
    )
    for note in choices.notes:
        logger.warning(note)


def evaluate_split(trainer: Trainer, rows: TokenRows) -> Evaluation:
    settings, runtime = trainer.job.settings, trainer.runtime
    config = trainer.model.model.config
    # Graphs of the training step do not serve here, and others are not worth compiling.
    with torch.compiler.set_stance("force_eager"):
        return evaluate(
            trainer.model,
            rows,
            make_planner(settings, runtime, trainer.choices),
            make_collator(trainer.job, runtime, trainer.choices, config),
            runtime,
            trainer.num_classes,
        )


def finish(trainer: Trainer, recorder: Recorder, session: Session) -> Evaluation:
    """Save the last model, test the best one and note its figures."""
    with recorder.paused("checkpoint"):
        session.end_with_best()
    with recorder.paused("evaluate"):
        test = evaluate_split(trainer, trainer.job.test)
    named = {"test_loss": test.loss}
    if test.accuracy is not None:
        named["test_accuracy"] = test.accuracy
    recorder.metrics.write(trainer.total_steps, named)
    return test
