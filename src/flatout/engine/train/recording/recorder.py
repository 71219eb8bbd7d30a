"""Record a run in progress: throughput, history, live metrics and health. The device is
synchronised only at logging steps, at which `log` reads the sums kept on the device."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.engine.batches.collation import StepBatch
from flatout.engine.batches.loader import StepLoader
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.tasks import higher_is_better
from flatout.engine.train.optimizer import learning_rate
from flatout.engine.train.own_figures import Callbacks
from flatout.engine.train.recording.health import (
    FIRST_POINTS,
    Conditions,
    NonFiniteError,
    find_problems,
)
from flatout.engine.train.recording.metrics_file import MetricsFile
from flatout.engine.train.recording.progress import Progress
from flatout.engine.train.recording.report import Evaluation, LogPoint
from flatout.engine.train.recording.timing import (
    WARMUP_STEPS,
    Rates,
    Window,
    WindowClock,
    compile_clock,
)
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.step import StepSums

logger = logging.getLogger(__name__)

ROWS_SHOWN = 8
LOGGED = ("loss", "accuracy")
"""The evaluation metrics that are logged, in addition to `train.metric`."""


@dataclass
class Recorder:
    """The state of a training session, except the model and the optimizer."""

    trainer: Trainer
    begin_s: float
    start_step: int = 0
    history: list[LogPoint] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    loader: StepLoader | None = None
    samples: int = 0
    first_batch_s: float = 0.0
    compiled_before_s: float = 0.0
    """Compilation time in seconds before the first step, while memory is measured."""
    compiled_first_s: float = 0.0
    """The compilation time in seconds up to the end of the first step."""
    initial_loss: float = float("nan")
    best: Evaluation | None = None
    best_folder: str | None = None
    """The folder name of the best model so far."""
    evaluations_without_best: int = 0
    """The number of evaluations since the best model was found."""
    exit_reason: str = "finished"
    last_checkpoint: Path | None = None
    warnings: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """The first warning about each kind of health problem, in order of occurrence."""
    table: Any = None
    """A DataFrame with a row per step, if `train.history` is `dataframe`."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The seconds spent in each phase outside of steps, such as evaluate."""
    progress: Progress | None = None
    """Logs progress, or None if no progress is logged."""

    def __post_init__(self) -> None:
        runtime = self.trainer.runtime
        job = self.trainer.job
        self.metrics = MetricsFile(job.metrics_file, enabled=runtime.ranks.is_main)
        self.clock = WindowClock(runtime.device)
        self.conditions = Conditions(runtime)
        paths = job.settings.train.callbacks if runtime.ranks.is_main else []
        self.callbacks = Callbacks(paths, self.metrics) if paths else None
        self._steps_since_log = 0
        self._loop_begin_s = 0.0
        self._elapsed_before_s = 0.0

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, as JSON values and dataclasses."""
        return {
            "history": list(self.history),
            "best": self.best,
            "best_folder": self.best_folder,
            "evaluations_without_best": self.evaluations_without_best,
            "initial_loss": self.initial_loss,
            "steps_since_log": self._steps_since_log,
            "elapsed_s": self._elapsed_s(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that was returned by the method `state`."""
        self.history = [LogPoint(**point) for point in state["history"]]
        best = state["best"]  # old checkpoints also have a confusion matrix
        self.best = Evaluation(best["loss"], best["metrics"]) if best else None
        self.best_folder = state["best_folder"]
        self.evaluations_without_best = state["evaluations_without_best"]
        self.initial_loss = state["initial_loss"]
        self._steps_since_log = state["steps_since_log"]
        self._elapsed_before_s = state["elapsed_s"]

    def _elapsed_s(self) -> float:
        """Return the elapsed time of the run in seconds, including earlier sessions."""
        return self._elapsed_before_s + time.perf_counter() - self.begin_s

    def start(self, start_step: int, loader: StepLoader | None = None) -> None:
        """Begin the loop at `start_step`. Throughput is measured from here on."""
        self.start_step, self.loader = start_step, loader
        self.metrics.start(start_step)
        self.compiled_before_s = compile_clock.seconds
        self._loop_begin_s = time.perf_counter()
        self.clock.begin()
        self.conditions.start()

    @property
    def setup_s(self) -> float:
        """The time in seconds before the loop began."""
        return self._loop_begin_s - self.begin_s

    @property
    def chance_loss(self) -> float | None:
        """The loss of random guesses, or None if it is not defined for the task."""
        job = self.trainer.job
        pieces = job.vocabulary.size if job.vocabulary else 1
        return job.task.chance_loss(len(job.label_names) or pieces)

    def check_health(self) -> None:
        """Warn of each problem that has not been reported yet."""
        for kind, text in find_problems(self).items():
            if text:
                self.warn(kind, text)

    def warn(self, kind: str, text: str) -> None:
        """Log and record a warning, unless there already is one of this `kind`."""
        if kind not in self.problems and self.trainer.runtime.ranks.is_main:
            logger.warning(text)
        self.problems.setdefault(kind, text)

    def step_begins(self) -> None:
        self.clock.step_begins()

    def step_ends(self, batch: StepBatch, wait_s: float, learning_rate: float) -> None:
        """Record a step after its kernels were launched. `wait_s` is the time in
        seconds for which the host waited for `batch`."""
        self.clock.step_ends(batch, wait_s)
        self.samples += batch.num_samples
        self._steps_since_log += int(batch.num_targets > 0)
        done_here = batch.step + 1 - self.start_step
        if done_here == 1:
            # This synchronises the device, to measure the first step.
            loss = read_loss(self.trainer)
            self.first_batch_s = time.perf_counter() - self._loop_begin_s
            self.compiled_first_s = compile_clock.seconds
            if self.start_step == 0 and batch.num_targets:
                self.initial_loss = loss
        if done_here == WARMUP_STEPS:
            self.trainer.runtime.synchronize()
            self.clock.begin()
        self._slow_habits(batch.step, learning_rate)

    def _slow_habits(self, step: int, learning_rate: float) -> None:
        """Imitate typical slow training loops after a step, if the settings ask for it.
        The settings in conf/slow do, for comparison."""
        train = self.trainer.job.settings.train
        if train.synchronize_every_step:
            loss = read_loss(self.trainer)
            if train.history == "dataframe":
                import pandas as pd

                row = {"step": step, "loss": loss, "learning_rate": learning_rate}
                self.table = pd.concat([self.table, pd.DataFrame([row])])
        every = train.empty_cache_every
        if every and (step + 1) % every == 0 and self.trainer.runtime.is_cuda:
            torch.cuda.empty_cache()

    def log_due(self, done: int) -> bool:
        every = self.trainer.job.settings.train.log_every
        return done % every == 0 or done == self.trainer.total_steps

    def log(self, batch: StepBatch, learning_rate: float) -> LogPoint:
        """Read the sums on the device, close the window, and add a point to the
        history. Return the point. Raises NonFiniteError if the loss or a gradient of a
        step was not finite."""
        # This synchronises the device.
        batch_s = self.loader.times.batch_s() if self.loader else 0.0
        figures = _read_sums(self.trainer, self.clock.compiles, batch_s)
        window = self.clock.close(int(figures["compiles"]), figures["batch_s"])
        if batch.step + 1 - self.start_step > WARMUP_STEPS:
            self.windows.append(window)
        self.conditions.sample()
        bad_step = int(figures["first_bad_step"])
        if bad_step < StepSums.NEVER:
            raise self._non_finite(bad_step, figures)
        point = self._point(figures, batch, learning_rate)
        self.history.append(point)
        self._write(point)
        self._steps_since_log = 0
        every = self.trainer.job.settings.train.log_every
        if point.step - self.start_step <= FIRST_POINTS * every:  # also if resumed
            self.check_health()
        done, total = point.step, self.trainer.total_steps
        logger.debug("step %d/%d  loss %.4f", done, total, point.loss)
        if self.progress is not None:
            spent_s = self.seconds["evaluate"]
            self.progress.window(point, self.windows, self.start_step, spent_s)
        times = {"epoch": point.epoch, "elapsed_s": point.elapsed_s}
        self.notify("log", point.step, point.as_metrics() | times)
        return point

    def notify(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Call the callbacks, if there are any. Step times do not include this."""
        if self.callbacks is not None:
            with self.paused("callbacks"):
                self.callbacks.call(event, step, values)

    def _write(self, point: LogPoint) -> None:
        """Write a point. If no step had a target, omit the loss and warn about it."""
        metrics = point.as_metrics()
        if not self._steps_since_log:
            del metrics["train_loss"]
            self.warn(
                "targets",
                f"no row of the batches up to step {point.step} has a target: the "
                "model cannot learn from them, and their loss of 0 is void",
            )
        self.metrics.write(point.step, metrics)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that adds the time spent in its block to `seconds[name]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Context manager that excludes its block from step time."""
        self.trainer.runtime.synchronize()
        self.clock.pause()
        with self.phase(phase), heartbeat.phase(phase):
            yield
            self.trainer.runtime.synchronize()
        self.clock.resume()

    def note_validation(self, done: int, result: Evaluation) -> bool:
        """Record an evaluation. Return whether it is the best so far."""
        named = result.named("validation")
        self.metrics.write(done, named)
        self.check_health()
        if self.trainer.runtime.ranks.is_main:
            names = dict.fromkeys([*LOGGED, self.trainer.job.settings.train.metric])
            logged = (f"validation_{name}" for name in names)
            shown = "  ".join(f"{n} {named[n]:.4f}" for n in logged if n in named)
            logger.info("step %d/%d  %s", done, self.trainer.total_steps, shown)
        self.notify("evaluation", done, named)
        return self._is_best(result)

    def _is_best(self, result: Evaluation) -> bool:
        """Return whether `result` is the best so far by `train.metric`, or by the loss
        if the metric has no value. Also update `evaluations_without_best`."""
        name = self._metric_of(result)
        job = self.trainer.job
        higher = higher_is_better(job.settings, type(job.task), name or "loss")
        sign = -1.0 if higher else 1.0
        found = sign * result.value(name)
        # The best value so far may be NaN, and no value is less than NaN.
        best = math.nan if self.best is None else sign * self.best.value(name)
        is_best = math.isnan(best) or found < best
        if not math.isnan(found):  # a missing value does not count for early stopping
            waited = 0 if is_best else self.evaluations_without_best + 1
            self.evaluations_without_best = waited
        return is_best

    def _metric_of(self, result: Evaluation) -> str | None:
        name = self.trainer.job.settings.train.metric
        if not math.isnan(result.value(name)) or name is None:
            return name
        self.warn(
            "metric",
            f"train.metric: {name} has no value on the validation split, as with rows "
            "of one class: the model with the lowest loss is kept",
        )
        return None

    @property
    def lost_patience(self) -> bool:
        """Whether too many evaluations in a row have brought no improvement."""
        patience = self.trainer.job.settings.train.early_stopping_patience
        return patience is not None and self.evaluations_without_best >= patience

    def end_at(self, done: int) -> None:
        """End the run after `done` steps, unless it is already complete."""
        if done < self.trainer.total_steps:
            self.trainer.total_steps = done
            self.exit_reason = "early stopping"
            logger.info(
                "early stopping after step %d: %d evaluations without a better %s",
                done,
                self.evaluations_without_best,
                self.trainer.job.settings.train.metric or "loss",
            )

    def _point(
        self, figures: dict[str, float], batch: StepBatch, learning_rate: float
    ) -> LogPoint:
        done, judged = batch.step + 1, figures["judged"]
        rates = Rates.over(self.windows[-1:])  # NaN during the warm-up
        return LogPoint(
            step=done,
            epoch=done / self.trainer.data.batches.steps_per_epoch,
            loss=figures["loss"] / max(1, self._steps_since_log),
            learning_rate=learning_rate,
            grad_norm=figures["last_norm"],
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            padded_tokens_per_s=rates.padded_tokens_per_s,
            loader_wait_pct=rates.loader_wait_pct,
            elapsed_s=self._elapsed_s(),
            train_accuracy=figures["hits"] / judged if judged else None,
        )

    def _non_finite(self, step: int, figures: dict[str, float]) -> NonFiniteError:
        trainer = self.trainer
        rows = trainer.data.batches.rows(step)
        rate = learning_rate(trainer.job.settings.train, step, trainer.total_steps)
        shown = ", ".join(map(str, rows[:ROWS_SHOWN].tolist()))
        more = ", ..." if len(rows) > ROWS_SHOWN else ""
        kept = self.last_checkpoint  # only the main rank knows it
        saved = f"; the newest checkpoint is {kept}" if kept else ""
        return NonFiniteError(
            f"step {step}: loss or gradient is not finite (last loss "
            f"{read_loss(trainer):g}, gradient norm {figures['last_norm']:g}) at "
            f"learning rate {rate:g}; rows of the batch: {shown}{more}. The step was "
            f"not applied{saved}. Lower train.learning_rate, or look at these rows"
        )


def read_loss(trainer: Trainer) -> float:
    """Synchronise the device and return the last step's mean loss over all ranks."""
    loss = trainer.stepper.sums.last_loss.detach().clone()
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(loss)
    return float(loss)


def _read_sums(trainer: Trainer, compiles: int, batch_s: float) -> dict[str, float]:
    """Read the sums over all ranks in a single copy from the device, and reset them.
    The result also contains the maxima of `compiles` and `batch_s` over all ranks."""
    sums = trainer.stepper.sums
    shared = torch.stack([total.double() for total in sums.totals])
    bad = sums.first_bad_step.double()
    least = torch.cat([bad[None], bad.new_tensor([-compiles, -batch_s])])
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(shared)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    values = torch.cat([shared, sums.last_norm.double()[None], least]).tolist()
    for total in sums.totals:
        total.zero_()
    names = ("loss", "hits", "judged", "last_norm", "first_bad_step")
    figures = dict(zip(names, values, strict=False))
    return figures | {"compiles": -values[-2], "batch_s": -values[-1]}
