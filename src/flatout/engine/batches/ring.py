"""Shared memory in which workers write batches for direct copies to the GPU.

A batch of images from a DataLoader worker is normally copied four times: out of Arrow,
into the batch's buffer, through shared memory and into page-locked memory. With the
ring, workers copy it once, directly into page-locked shared memory.
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
"""Extra slots for the batch in use, the one being copied and the one requested next."""
EXTRA_BYTES = 128
"""Extra bytes per row for targets, labels and crops. A batch that does not fit in its
slot is sent as an ordinary DataLoader batch."""


class Ring:
    """A ring buffer with one batch per slot. A slot is reused once its batch has been
    copied to the device."""

    def __init__(self, places: int, size: int) -> None:
        """Allocate `places` slots, each for a step of at most `size` bytes."""
        size = round_up(size, mmap.PAGESIZE)
        self._shared = mmap.mmap(-1, places * size)
        flat = torch.frombuffer(self._shared, dtype=torch.uint8)
        self._memory = flat.view(places, size)
        self._read: list[Any] = [None] * places

    @classmethod
    def of(cls, data: StepRows, ahead: int) -> Ring:
        """Create a ring for the batches of `data`, of which `ahead` are prefetched."""
        rows = -(-data.batches.batch_size // data.planner.world_size)
        row_bytes = data.rows.row_bytes + EXTRA_BYTES
        return cls(ahead + SPARE, rows * row_bytes + 64 * ALIGNMENT)

    def __len__(self) -> int:
        return len(self._memory)

    def place(self, number: int) -> Tensor:
        """Return the memory of slot `number` as a tensor of shape (bytes,)."""
        return self._memory[number]

    def numbered(self, steps: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield pairs (step, slot number). Each pair is yielded after the previous
        batch in this slot has been copied to the device."""
        for count, step in enumerate(steps):
            number = count % len(self)
            if self._read[number] is not None:
                self._read[number].synchronize()
            yield step, number

    def batches(
        self, made: Iterable[StepBatch], copies: Any = None
    ) -> Generator[StepBatch]:
        """Yield the batches in the order of `numbered`. A batch that was written to the
        ring gets its slot as its buffer. Before the consumer requests the next batch,
        it must have started to copy the current one on the stream `copies`."""
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
        """Context manager that page-locks the ring's memory, so that copies to the GPU
        do not block. Enter it only after all workers have been forked."""
        start, size = self._memory.data_ptr(), self._memory.nbytes
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(start, size, 0))
        if failed:
            logger.warning(
                "%.1f GiB of host memory cannot be locked (CUDA error %d): copies to "
                "the GPU block; raise ulimit -l, or lower train.loader.prefetch_factor",
                size / 2**30,
                failed,
            )
            # Clear the error; otherwise PyTorch would raise it at the next kernel.
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
    """A map-style dataset of batches, indexed by a pair (step, slot number). If a batch
    fits in the slot, only its metadata is sent to the main process."""

    data: StepRows
    ring: Ring

    def __getitem__(self, at: tuple[int, int]) -> StepBatch:
        step, place = at
        memory = self.ring.place(place)
        batch = self.data.made(step, memory)
        if batch.buffer.data_ptr() != memory.data_ptr():
            return batch
        return replace(batch, buffer=torch.empty(0, dtype=torch.uint8))
