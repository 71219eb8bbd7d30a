"""Habits of slow training loops at every step, which conf/slow uses as a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flatout.engine.batches.collation import StepBatch
from flatout.engine.train.recording.recorder import Recorder, read_loss
from flatout.engine.train.setup.assemble import Trainer


def make_recorder(trainer: Trainer, begin_s: float) -> Recorder:
    """Create a plain recorder, or a slow one if the settings request a habit."""
    train = trainer.job.settings.train
    slow = train.synchronize_every_step or train.empty_cache_every
    return (SlowRecorder if slow else Recorder)(trainer, begin_s)


@dataclass
class SlowRecorder(Recorder):
    """Reads the loss, extends a table or empties the cache after each step."""

    table: Any = None
    """One line per step, if `train.history` is `dataframe`."""

    def step_ends(self, batch: StepBatch, wait_s: float, learning_rate: float) -> None:
        super().step_ends(batch, wait_s, learning_rate)
        train = self.trainer.job.settings.train
        if train.synchronize_every_step:
            loss = read_loss(self.trainer)
            if train.history == "dataframe":
                self._append(batch.step, loss, learning_rate)
        every = train.empty_cache_every
        if every and (batch.step + 1) % every == 0 and self.trainer.runtime.is_cuda:
            torch.cuda.empty_cache()

    def _append(self, step: int, loss: float, learning_rate: float) -> None:
        import pandas as pd

        row = pd.DataFrame(
            [{"step": step, "loss": loss, "learning_rate": learning_rate}]
        )
        self.table = row if self.table is None else pd.concat([self.table, row])
