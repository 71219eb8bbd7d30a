"""Few steps that speak for an epoch: the rows that every window goes over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flatout.engine.batching import GlobalBatches
from flatout.engine.collation import StepBatch, StepRows
from flatout.engine.tokens import TokenRows

CANDIDATE_BLOCKS = 64
ENDLESS = 2**40
"""Steps of a loader that is left when enough is measured."""


@dataclass(frozen=True)
class BlockRows(StepRows):
    """The same `period` steps over and over, from `first` on: every window measures
    the same rows. Steps are numbered from 0 without a gap."""

    first: int = 0
    period: int = 1

    def __getitem__(self, index: int) -> StepBatch:
        batch = super().__getitem__(self.first + index % self.period)
        return replace(batch, step=index)

    @classmethod
    def of(cls, data: StepRows, steps: int) -> BlockRows:
        first, period = representative_block(data.rows, data.batches, steps)
        parts = (data.rows, data.batches, data.planner, data.collator, data.rank)
        return cls(*parts, first=first, period=period)


def representative_block(
    rows: TokenRows, batches: GlobalBatches, steps: int
) -> tuple[int, int]:
    """First step and number of steps of the first epoch whose mean length is nearest
    to that of all rows, so that few steps speak for an epoch."""
    whole = max(1, len(rows) // batches.batch_size)
    steps = min(steps, whole)
    starts = np.unique(np.linspace(0, whole - steps, CANDIDATE_BLOCKS).astype(int))
    mean = float(rows.all_lengths.mean())

    def distance(start: int) -> float:
        block = [batches.rows(step) for step in range(start, start + steps)]
        return abs(float(rows.lengths(np.concatenate(block)).mean()) - mean)

    return min(starts.tolist(), key=distance), steps
