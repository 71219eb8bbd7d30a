"""What a run notes while it goes: windows, the history, live points, its health.

Between two log points nothing here waits for the device; `log` is where the host
reads the sums that the device has kept.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.engine import health
from flatout.engine.assemble import Trainer
from flatout.engine.collation import StepBatch
from flatout.engine.conditions import Conditions
from flatout.engine.jobs.heartbeat import heartbeat
from flatout.engine.optim import learning_rate
from flatout.engine.progress import Progress
from flatout.engine.report import Evaluation, LogPoint
from flatout.engine.step import StepSums
from flatout.engine.timing import WARMUP_STEPS, Stopwatch, Window, WindowClock
from flatout.engine.warm_up import warm_up

logger = logging.getLogger(__name__)


@dataclass
class MetricsFile:
    """Live points, a JSON line each, flushed at once. Whatever forwards them to a
    tracking store reads this file: a store that is slow or gone costs no step."""

    path: Path
    enabled: bool = True

    _written: set[tuple[int, str]] = field(default_factory=set)
    """(step, metric) of points that an interrupted session wrote already."""
    _waiting: list[str] = field(default_factory=list)

    def start(self, start_step: int) -> None:
        """A new run begins with an empty file. A resumed one goes on in it, and points
        that are there already are not written again."""
        if not self.enabled:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        if start_step == 0 or not lines:
            self.path.write_text("")
            return
        torn = len(lines.pop())  # a line that a kill has cut short
        os.truncate(self.path, self.path.stat().st_size - torn)
        for line in lines:
            point = json.loads(line)
            self._written |= {(point["step"], name) for name in point["metrics"]}

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # Whole points: the rates that a warm-up lacked would come after later steps.
        repeated = any((step, name) in self._written for name in metrics)
        if metrics and not repeated:
            self._append({"step": step, "metrics": metrics})

    def note_settled(self, step: int, settled: dict[str, Any]) -> None:
        """What runs from `step` on, all `auto` being settled: known of a run that is
        killed before its report, too."""
        self._append({"step": step, "metrics": {}, "settled": settled})

    def _append(self, line: dict[str, Any]) -> None:
        if self.enabled:
            self._waiting.append(json.dumps({**line, "time_s": time.time()}) + "\n")
            self._write_waiting()

    def _write_waiting(self) -> None:
        """A full disk costs no run: points wait until there is room."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.writelines(self._waiting)
            self._waiting.clear()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written now: %s", self.path, error)
            with suppress(OSError):
                os.truncate(self.path, size)  # no part of a line stays


@dataclass
class Recorder:
    """State of a session beside model and optimizer."""

    trainer: Trainer
    begin_s: float
    start_step: int = 0
    history: list[LogPoint] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    samples: int = 0
    first_batch_s: float = 0.0
    initial_loss: float = float("nan")
    best: Evaluation | None = None
    best_folder: str | None = None
    """Name of the folder of the best model so far."""
    last_checkpoint: Path | None = None
    warnings: list[str] = field(default_factory=list)
    watch: Stopwatch = field(default_factory=Stopwatch)
    progress: Progress | None = None
    """Tells people; None: nobody is told."""

    def __post_init__(self) -> None:
        runtime = self.trainer.runtime
        job = self.trainer.job
        self.metrics = MetricsFile(job.metrics_file, enabled=runtime.ranks.is_main)
        self.clock = WindowClock(runtime.device)
        self.conditions = Conditions(runtime)
        self._habits = SlowHabits(self.trainer)
        self._steps_since_log = 0
        self._loop_begin_s = 0.0
        self._elapsed_before_s = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: JSON values, and frozen results."""
        return {
            "history": list(self.history),
            "best": self.best,
            "best_folder": self.best_folder,
            "initial_loss": self.initial_loss,
            "steps_since_log": self._steps_since_log,
            "elapsed_s": self._elapsed_s(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The opposite of `state`."""
        self.history = [LogPoint(**point) for point in state["history"]]
        self.best = state["best"] and Evaluation(**state["best"])
        self.best_folder = state["best_folder"]
        self.initial_loss = state["initial_loss"]
        self._steps_since_log = state["steps_since_log"]
        self._elapsed_before_s = state["elapsed_s"]

    def _elapsed_s(self) -> float:
        """Over all sessions of the run."""
        return self._elapsed_before_s + time.perf_counter() - self.begin_s

    def start(self, start_step: int) -> None:
        """The loop begins now, at `start_step`; a rate counts from here on."""
        self.start_step = start_step
        self.metrics.start(start_step)
        self._loop_begin_s = time.perf_counter()
        self.clock.begin()
        self.conditions.start()

    def step_begins(self) -> None:
        self.clock.step_begins()

    def step_ends(self, batch: StepBatch, wait_s: float, rate: float) -> None:
        self.clock.step_ends(batch, wait_s)
        self.samples += batch.num_samples
        self._steps_since_log += 1
        self._habits.after_step(batch.step, rate)
        done_here = batch.step + 1 - self.start_step
        if done_here == 1:
            # The one wait outside of log points: how long the first step took.
            loss = read_loss(self.trainer)
            self.first_batch_s = time.perf_counter() - self._loop_begin_s
            if self.start_step == 0:
                self.initial_loss = loss
        if done_here == WARMUP_STEPS:
            warm_up.ends()
            self.trainer.runtime.synchronize()
            self.clock.begin()

    def log_due(self, done: int) -> bool:
        every = self.trainer.job.settings.train.log_every
        return done % every == 0 or done == self.trainer.total_steps

    def log(self, batch: StepBatch, rate: float) -> LogPoint:
        """Read the device's sums, close the window, note a point of the history.
        Raises NonFiniteError."""
        # Here the host waits for the device.
        figures = _read_sums(self.trainer, self.clock.compiles)
        window = self._close_window(batch.step + 1, int(figures["compiles"]))
        self.conditions.sample()
        bad_step = int(figures["first_bad_step"])
        if bad_step < StepSums.NEVER:
            raise self._bad_step(bad_step, figures).error()
        point = self._point(window, figures, batch, rate)
        self._steps_since_log = 0
        if window is not None:
            self.windows.append(window)
        self.history.append(point)
        self.metrics.write(point.step, point.as_metrics())
        done, total = point.step, self.trainer.total_steps
        logger.debug("step %d/%d  loss %.4f", done, total, point.loss)
        if self.progress is not None:
            evaluate_s = self.watch.seconds.get("evaluate", 0.0)
            self.progress.window(point, self.windows, self.start_step, evaluate_s)
        return point

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Time of evaluations and checkpoints is no step time."""
        self.trainer.runtime.synchronize()
        self.clock.pause()
        with self.watch.phase(phase), heartbeat.phase(phase):
            yield
            self.trainer.runtime.synchronize()
        self.clock.resume()

    def note_validation(self, done: int, result: Evaluation) -> bool:
        """Write it down; True where it is the best so far."""
        named = {"validation_loss": result.loss}
        if result.accuracy is not None:
            named["validation_accuracy"] = result.accuracy
        self.metrics.write(done, named)
        if self.trainer.runtime.ranks.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items())
            logger.info("step %d/%d  %s", done, self.trainer.total_steps, shown)
        return self.best is None or result.loss < self.best.loss

    def _close_window(self, done: int, compiles: int) -> Window | None:
        """None without a step behind the warm-up."""
        window = self.clock.close(compiles)
        warm = done - self.start_step > WARMUP_STEPS
        return window if warm and window.steps else None

    def _point(
        self,
        window: Window | None,
        figures: dict[str, float],
        batch: StepBatch,
        rate: float,
    ) -> LogPoint:
        done = batch.step + 1
        judged = figures["judged"]
        return LogPoint(
            step=done,
            epoch=done / self.trainer.data.batches.steps_per_epoch,
            loss=figures["loss"] / max(1, self._steps_since_log),
            learning_rate=rate,
            grad_norm=figures["last_norm"],
            **_rates(window),
            elapsed_s=self._elapsed_s(),
            train_accuracy=figures["hits"] / judged if judged else None,
        )

    def _bad_step(self, step: int, figures: dict[str, float]) -> health.BadStep:
        trainer = self.trainer
        settings = trainer.job.settings.train
        return health.BadStep(
            step=step,
            row_ids=trainer.data.batches.rows(step),
            learning_rate=learning_rate(settings, step, trainer.total_steps),
            loss=read_loss(trainer),
            grad_norm=figures["last_norm"],
            last_checkpoint=self.last_checkpoint,
        )


def _rates(window: Window | None) -> dict[str, float]:
    """NaN in the warm-up."""
    if window is None:
        names = ("samples_per_s", "tokens_per_s", "padded_tokens_per_s")
        return dict.fromkeys((*names, "loader_wait_pct"), float("nan"))
    return {
        "samples_per_s": window.samples / window.wall_s,
        "tokens_per_s": window.tokens / window.wall_s,
        "padded_tokens_per_s": window.padded_tokens / window.wall_s,
        "loader_wait_pct": 100 * window.wait_s / window.wall_s,
    }


def read_loss(trainer: Trainer) -> float:
    """Mean loss of the last step over all ranks; waits for the device."""
    loss = trainer.stepper.sums.last_loss.detach().clone()
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(loss)
    return float(loss)


def _read_sums(trainer: Trainer, compiles: int) -> dict[str, float]:
    """One transfer for all figures; summed over ranks. `compiles`: this rank's; the
    most of any comes back."""
    sums = trainer.stepper.sums
    shared = torch.stack([sums.loss.double(), sums.hits.double(), sums.judged.double()])
    bad = sums.first_bad_step
    least = torch.stack([bad, torch.full_like(bad, -compiles)])
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(shared)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    values = torch.cat([shared, sums.last_norm.double()[None], least.double()]).tolist()
    names = ("loss", "hits", "judged", "last_norm", "first_bad_step", "compiles")
    sums.reset()
    figures = dict(zip(names, values, strict=True))
    return figures | {"compiles": -figures["compiles"]}


class SlowHabits:
    """What slow loops do at every step (guide B), kept as a measuring stick. By
    default nothing: the history is a list that is written once, at the end."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._settings = trainer.job.settings.train
        self._table: Any = None

    def after_step(self, step: int, rate: float) -> None:
        settings = self._settings
        if settings.synchronize_every_step:
            loss = read_loss(self._trainer)
            if settings.history == "dataframe":
                self._append(step, loss, rate)
        every = settings.empty_cache_every
        if every and (step + 1) % every == 0 and self._trainer.runtime.is_cuda:
            torch.cuda.empty_cache()

    def _append(self, step: int, loss: float, rate: float) -> None:
        import pandas as pd

        row = pd.DataFrame([{"step": step, "loss": loss, "learning_rate": rate}])
        self._table = row if self._table is None else pd.concat([self._table, row])
