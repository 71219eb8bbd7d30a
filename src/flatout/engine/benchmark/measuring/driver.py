"""Run training steps one by one, on a few batches that are typical of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from flatout.engine.batches.collation import StepBatch, StepRows
from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.batches.loader import StepLoader
from flatout.engine.rows.rows import SplitRows
from flatout.engine.train.loop import take_step
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.recording.timing import WindowClock
from flatout.engine.train.setup.assemble import Trainer


class Driver:
    """Runs single training steps. `window_clock` times the windows of the benchmark,
    because the recorder's own clock restarts at each logging step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.recorder = Recorder(trainer, time.perf_counter())
        self.window_clock = WindowClock(trainer.runtime.device)
        self.recorder.start(0)
        self._done = 0

    def step(self, batch: StepBatch, wait_s: float) -> None:
        batch = replace(batch, step=self._done)
        learning_rate = take_step(self.trainer, self, batch, wait_s)
        self._done += 1
        if self.recorder.log_due(self._done):
            self.recorder.log(batch, learning_rate)

    def step_begins(self) -> None:
        self.recorder.step_begins()
        self.window_clock.step_begins()

    def step_ends(self, batch: StepBatch, wait_s: float, learning_rate: float) -> None:
        self.window_clock.step_ends(batch, wait_s)
        self.recorder.step_ends(batch, wait_s, learning_rate)

    def synchronize(self) -> None:
        self.trainer.runtime.synchronize()


@dataclass
class Feed:
    """An endless stream of the batches of a block of `period` steps. `loader` is None
    if all batches are already on the device."""

    loader: StepLoader | None
    batches: Iterator[StepBatch]
    period: int

    def step(self, driver: Driver) -> None:
        batch = next(self.batches)
        driver.step(batch, self.loader.wait_s if self.loader else 0.0)


CANDIDATE_BLOCKS = 64
ENDLESS = 2**40
"""Number of steps of an endless loader, which is discarded after the measurement."""


@dataclass(frozen=True)
class BlockRows(StepRows):
    """Repeats the `period` steps that start at step `first`, so that every window
    measures the same rows. The repeated steps are numbered consecutively from 0."""

    first: int = 0
    period: int = 1

    def made(self, step: int, memory: Tensor | None = None) -> StepBatch:
        batch = super().made(self.first + step % self.period, memory)
        return replace(batch, step=step)

    @classmethod
    def of(cls, data: StepRows, steps: int) -> BlockRows:
        first, period = representative_block(data.rows, data.batches, steps)
        parts = (data.rows, data.batches, data.planner, data.collator, data.rank)
        return cls(*parts, first=first, period=period)


def loaded_feed(trainer: Trainer, steps: int) -> Feed:
    """Return a feed that reads a representative block through the loader."""
    block = BlockRows.of(trainer.data, steps)
    settings = trainer.job.settings.train.loader
    loader = StepLoader(block, settings, trainer.runtime, 0, ENDLESS)
    return Feed(loader, iter(loader), block.period)


def representative_block(
    rows: SplitRows, batches: GlobalBatches, steps: int
) -> tuple[int, int]:
    """Return the first step and the number of steps (at most `steps`) of the part of
    the first epoch whose mean row length is closest to that of all rows."""
    whole = max(1, len(rows) // batches.batch_size)
    steps = min(steps, whole)
    starts = np.unique(np.linspace(0, whole - steps, CANDIDATE_BLOCKS).astype(int))
    mean = rows.facts.mean_length

    def distance(start: int) -> float:
        block = [batches.rows(step) for step in range(start, start + steps)]
        return abs(float(rows.lengths(np.concatenate(block)).mean()) - mean)

    return min(starts.tolist(), key=distance), steps
