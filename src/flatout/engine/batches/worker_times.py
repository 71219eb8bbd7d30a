"""How long the loader's workers need for a batch.

Workers go on loading while evaluations and checkpoints stop the clock, and while the
first step compiles. Steps that train on what then lies ready are faster than the loader
can be for long. What a batch costs its worker does not depend on pauses, and no rate
may be higher than that allows.
"""

from __future__ import annotations

import mmap

import numpy as np

BATCHES_A_WORKER = 2
"""Fewer say too little."""


class WorkerTimes:
    """Batches that each worker made and the seconds they took, in shared memory."""

    def __init__(self, num_workers: int) -> None:
        self._least = BATCHES_A_WORKER * num_workers
        self._workers = num_workers
        shared = mmap.mmap(-1, max(1, num_workers) * 2 * np.dtype(np.float64).itemsize)
        self._sums = np.frombuffer(shared, np.float64).reshape(-1, 2)
        self._told = np.zeros(2)
        self._batch_s = 0.0

    def add(self, worker: int, seconds: float) -> None:
        """A worker calls it for each batch."""
        self._sums[worker] += (1, seconds)

    def batch_s(self) -> float:
        """Seconds from one batch to the next where no worker ever waits, since the last
        call that found enough of them; 0: not known, or no workers."""
        made, busy_s = self._sums.sum(axis=0) - self._told
        if made and (made >= self._least or not self._batch_s):
            self._batch_s = float(busy_s / made / self._workers)
            self._told += (made, busy_s)
        return self._batch_s
