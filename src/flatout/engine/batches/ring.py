"""Memory that workers write steps to and a device reads them from.

A batch of images that travels from a worker as usual is copied four times: out of
Arrow, beside the batch's other tensors, through shared memory, into page-locked memory.
Here it is copied once. Workers are forked, and share the pages; the host locks them.
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

from flatout.engine.batches.buffers import ALIGNMENT
from flatout.engine.batches.collation import StepBatch, StepRows
from flatout.engine.rows.layout import round_up

logger = logging.getLogger(__name__)

SPARE = 3
"""Places beside those of batches under way: of the one in hand, of the one that a
device copies, and of the one that is asked for."""
BESIDE_BYTES = 128
"""A row's, of targets, labels and crops. A batch that has more travels as usual."""


@dataclass(frozen=True)
class Made:
    """What a worker hands over: a batch, without its buffer where that lies in a place
    of the ring."""

    batch: StepBatch
    place: int | None
    size: int

    def pin_memory(self) -> Made:
        """Called by the DataLoader's pinning thread, which reads the messages; the
        ring is locked already."""
        if self.place is not None:
            return self
        return replace(self, batch=self.batch.pin_memory())


class Ring:
    """Places that steps take in turn. One is written again when what read it, the copy
    to a device, is done."""

    def __init__(self, places: int, size: int) -> None:
        """`size`: most bytes of a step."""
        size = round_up(size, mmap.PAGESIZE)
        self._shared = mmap.mmap(-1, places * size)
        flat = torch.frombuffer(self._shared, dtype=torch.uint8)
        self._memory = flat.view(places, size)
        self._read: list[Any] = [None] * places

    @staticmethod
    def fits(data: StepRows) -> bool:
        """Whether rows have a fixed size."""
        return bool(getattr(data.rows, "row_bytes", 0))

    @classmethod
    def of(cls, data: StepRows, ahead: int) -> Ring:
        """For batches of `data`, of which `ahead` are under way."""
        rows = -(-data.batches.batch_size // data.planner.world_size)
        row_bytes = data.rows.row_bytes + BESIDE_BYTES  # type: ignore[attr-defined]
        return cls(ahead + SPARE, rows * row_bytes + 64 * ALIGNMENT)

    def __len__(self) -> int:
        return len(self._memory)

    def place(self, number: int) -> Tensor:
        """(bytes,)."""
        return self._memory[number]

    def numbered(self, steps: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Each step with its place, when nothing reads that any more."""
        for count, step in enumerate(steps):
            number = count % len(self)
            if self._read[number] is not None:
                self._read[number].synchronize()
            yield step, number

    def batches(self, made: Iterable[Made], copies: Any = None) -> Generator[StepBatch]:
        """With their buffers. Whoever takes one has begun to copy it, on the stream
        `copies`, when asking for the next."""
        for one in made:
            if one.place is None:
                yield one.batch
                continue
            yield replace(one.batch, buffer=self.place(one.place)[: one.size])
            if copies is not None:
                self._read[one.place] = copies.record_event()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Pages that a GPU reads by itself; called when all workers are forked."""
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
            # PyTorch would raise the error that this left at its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
        try:
            yield
        finally:
            if not failed:
                torch.cuda.synchronize()
                runtime.cudaHostUnregister(start)


@dataclass(frozen=True)
class InPlaces:
    """Map-style data of a DataLoader whose index is a step and its place."""

    data: StepRows
    ring: Ring

    def __getitem__(self, at: tuple[int, int]) -> Made:
        step, place = at
        memory = self.ring.place(place)
        batch = self.data.made(step, memory)
        if batch.buffer.data_ptr() != memory.data_ptr():
            return Made(batch, None, 0)
        size = len(batch.buffer)
        nothing = torch.empty(0, dtype=torch.uint8)
        return Made(replace(batch, buffer=nothing), place, size)
