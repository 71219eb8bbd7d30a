"""Memory that workers write steps to and a device reads them from.

A batch of images from a DataLoader worker is normally copied four times: out of Arrow,
next to the batch's other tensors, through shared memory, into page-locked memory. Here
it is copied once. Workers are forked and share the pages; the host locks them.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatout.engine.batches.buffers import ALIGNMENT, places
from flatout.engine.batches.collation import StepBatch, StepRows
from flatout.engine.rows.layout import round_up

logger = logging.getLogger(__name__)

SPARE = 3
"""Extra slots: for the batch in use, for the one that the device copies, and for the
one that is requested."""
EXTRA_BYTES = 128
"""Bytes per row for targets, labels and crops. A larger batch is sent normally."""


class Ring:
    """Slots that steps use in turn. A slot is reused when its copy to the device is
    done."""

    def __init__(self, places: int, size: int) -> None:
        """`size`: maximum bytes of a step."""
        size = round_up(size, mmap.PAGESIZE)
        self._shared = mmap.mmap(-1, places * size)
        flat = torch.frombuffer(self._shared, dtype=torch.uint8)
        self._memory = flat.view(places, size)
        self._read: list[Any] = [None] * places

    @classmethod
    def of(cls, data: StepRows, ahead: int) -> Ring:
        """Ring for batches of `data`, of which `ahead` are in progress."""
        rows = -(-data.batches.batch_size // data.planner.world_size)
        row_bytes = data.rows.row_bytes + EXTRA_BYTES
        return cls(ahead + SPARE, rows * row_bytes + 64 * ALIGNMENT)

    def __len__(self) -> int:
        return len(self._memory)

    def place(self, number: int) -> Tensor:
        """Memory of one slot (bytes,)."""
        return self._memory[number]

    def numbered(self, steps: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Each step with its slot, once the slot's last copy is done."""
        for count, step in enumerate(steps):
            number = count % len(self)
            if self._read[number] is not None:
                self._read[number].synchronize()
            yield step, number

    def batches(
        self, made: Iterable[StepBatch], copies: Any = None
    ) -> Generator[StepBatch]:
        """Batches with their buffers, in the order of `numbered`. The consumer must
        have started the copy of a batch, on the stream `copies`, before it requests
        the next one."""
        for count, batch in enumerate(made):
            if len(batch.buffer):
                yield batch
                continue
            number, (size, _) = count % len(self), places(batch.layout)
            yield replace(batch, buffer=self.place(number)[:size])
            if copies is not None:
                self._read[number] = copies.record_event()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Page-lock the memory for GPU reads; call it after all workers are forked."""
        start, size = self._memory.data_ptr(), self._memory.nbytes
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(start, size, 0))
        if failed:
            logger.warning(
                "%.1f GiB of host memory cannot be locked (CUDA error %d): copies to "
                "the GPU wait; raise ulimit -l, or lower train.loader.prefetch_factor",
                size / 2**30,
                failed,
            )
            # Otherwise PyTorch would raise this error at its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
        try:
            yield
        finally:
            if not failed:
                torch.cuda.synchronize()
                runtime.cudaHostUnregister(start)


@dataclass(frozen=True)
class RingDataset:
    """Map-style data of a DataLoader whose index is a step and its slot. A batch that
    is in the slot is sent without its buffer."""

    data: StepRows
    ring: Ring

    def __getitem__(self, at: tuple[int, int]) -> StepBatch:
        step, place = at
        memory = self.ring.place(place)
        batch = self.data.made(step, memory)
        if batch.buffer.data_ptr() != memory.data_ptr():
            return batch
        return replace(batch, buffer=torch.empty(0, dtype=torch.uint8))
