"""Log the progress of a run, with an estimate of the remaining time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from flatout.engine.machine.runtime import memory
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.recording.timing import Window, seconds_of, steady
from flatout.engine.train.setup.assemble import Trainer

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""The minimum number of seconds between two progress lines."""
EVALUATION_SPEEDUP = 3.0
"""The assumed ratio of evaluation throughput to training throughput, which is used
until an evaluation has been measured."""
WINDOWS_TO_JUDGE = 2
"""The number of windows after the warm-up that a deadline warning requires."""


class Progress:
    """Logs progress on the main rank, at the first and last step and every 10 s."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_warned = False
        self._next_s = -math.inf

    def window(
        self,
        point: LogPoint,
        windows: Sequence[Window],
        start: int,
        evaluate_s: float,
    ) -> None:
        """Log a progress line if enough time has passed, and a warning if the run will
        probably miss its deadline. The session began at step `start` and has spent
        `evaluate_s` seconds on evaluations."""
        if not self._trainer.runtime.ranks.is_main:
            return
        left_s = self._left_s(point.step, windows, start, evaluate_s)
        self._warn_of_deadline(point.elapsed_s + left_s, windows)
        now = time.monotonic()
        if now < self._next_s and point.step < self._trainer.total_steps:
            return
        self._next_s = now + EVERY_S
        memory_gib = memory(self._trainer.runtime)["peak_reserved_gib"]
        total = self._trainer.total_steps
        logger.info(progress_line(point, total, windows, memory_gib, left_s))

    def _left_s(
        self, done: int, windows: Sequence[Window], start: int, evaluate_s: float
    ) -> float:
        """Return the estimated time in seconds for the remaining steps and evaluations,
        including that of the test split, or NaN if throughput is not yet known."""
        job, total = self._trainer.job, self._trainer.total_steps
        chosen = steady(list(windows))
        steps = sum(window.steps for window in chosen)
        if not steps:
            return math.nan
        wall_s = sum(window.wall_s for window in chosen)
        every = evaluation_interval(self._trainer)
        evaluated = evaluations(start, done - 1, total, every) * len(job.validation)
        to_come = evaluations(done - 1, total, total, every) * len(job.validation)
        if evaluated and evaluate_s:
            row_s = evaluate_s / evaluated
        else:
            samples = sum(window.samples for window in chosen)
            row_s = wall_s / max(1, samples) / EVALUATION_SPEEDUP
        return (total - done) * wall_s / steps + (to_come + len(job.test)) * row_s

    def _warn_of_deadline(self, whole_s: float, windows: Sequence[Window]) -> None:
        deadline_hours = self._trainer.job.settings.train.deadline_hours
        if deadline_hours is None or self._has_warned:
            return
        if len(windows) < WINDOWS_TO_JUDGE or not whole_s > 3600 * deadline_hours:
            return
        self._has_warned = True
        logger.warning(
            "At this rate training takes %s, evaluations included; "
            "train.deadline_hours is %g. Faster settings for this model, data and "
            "machine: kedro run --pipelines=benchmark, then kedro run --env=tuned",
            duration(whole_s),
            deadline_hours,
        )


def progress_line(
    point: LogPoint,
    total_steps: int,
    windows: Sequence[Window],
    memory_gib: float,
    left_s: float,
) -> str:
    """Return a line such as `step 40/900  18 s left  loss 1.2345  512 samples/s`."""
    begin, loss = f"step {point.step}/{total_steps}", f"loss {point.loss:.4f}"
    if not windows:
        return f"{begin}  {loss}  {memory_gib:.1f} GiB  (no rate yet)"
    chosen = steady(list(windows))
    mean = sum(w.samples for w in chosen) / seconds_of(chosen)
    padding_pct = 100 * (1 - point.tokens_per_s / point.padded_tokens_per_s)
    return "  ".join(
        [
            begin,
            f"{duration(left_s)} left",
            loss,
            f"{point.samples_per_s:.0f} samples/s (mean {mean:.0f})",
            f"loader wait {point.loader_wait_pct:.1f} %",
            f"padding {padding_pct:.0f} %",
            f"{memory_gib:.1f} GiB",
        ]
    )


def duration(seconds: float) -> str:
    """Format `seconds` as `45 s`, `3 min 20 s` or `5 h 07 min`."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"


def evaluation_interval(trainer: Trainer) -> int | None:
    """Return the number of steps between two evaluations, or None if there is only one
    after the last step."""
    every = trainer.job.settings.train.evaluate_every
    if every == "epoch":
        return trainer.data.batches.steps_per_epoch
    return None if every is None else int(every)


def evaluation_due(trainer: Trainer, done: int) -> bool:
    """Return whether the validation split must be evaluated after `done` steps."""
    total, every = trainer.total_steps, evaluation_interval(trainer)
    return evaluations(done - 1, done, total, every) == 1


def evaluations(after: int, until: int, total: int, every: int | None) -> int:
    """Return the number of evaluations in the steps `after` + 1 to `until`. There is
    one after every `every` steps, and one after the last step `total`."""
    multiples = until // every - after // every if every else 0
    last = after < total <= until and not (every and total % every == 0)
    return multiples + int(last)
