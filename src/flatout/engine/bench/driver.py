"""Training steps one by one, as the training loop takes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flatout.engine.assemble import Trainer
from flatout.engine.collation import StepBatch
from flatout.engine.loader import StepLoader
from flatout.engine.optim import learning_rate, set_learning_rate
from flatout.engine.recorder import Recorder
from flatout.engine.timing import WindowClock


class Driver:
    """Takes training steps one by one, as the training loop does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.recorder = Recorder(trainer, time.perf_counter())
        self.clock = WindowClock(trainer.runtime.device)
        self.recorder.start(0)
        self._done = 0

    def step(self, batch: StepBatch, wait_s: float) -> None:
        trainer = self.trainer
        train, total = trainer.job.settings.train, trainer.total_steps
        batch = replace(batch, step=self._done)
        rate = learning_rate(train, self._done % total, total)
        set_learning_rate(trainer.optimizer, rate)
        self.recorder.step_begins()
        self.clock.step_begins()
        trainer.stepper(batch)
        self.clock.step_ends(batch, wait_s)
        self.recorder.step_ends(batch, wait_s, rate)
        self._done += 1
        if self.recorder.log_due(self._done):
            self.recorder.log(batch, rate)

    def synchronize(self) -> None:
        self.trainer.runtime.synchronize()


@dataclass
class Feed:
    """Batches of a block without end, and how long the last one kept the step."""

    loader: StepLoader | None
    batches: Iterator[StepBatch]
    period: int

    def step(self, driver: Driver) -> None:
        batch = next(self.batches)
        driver.step(batch, self.loader.wait_s if self.loader else 0.0)
