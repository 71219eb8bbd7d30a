"""Steps from persistent workers to the device, without a gap between epochs.

The index of the loader is the step, so one DataLoader serves the whole run, a resumed
run starts at its step in constant time, and workers are never restarted.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from flatout.engine.batches.collation import StepBatch, StepRows, StepRun
from flatout.engine.batches.ring import Ring, RingDataset
from flatout.engine.machine.environment import usable_cores
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import LoaderSettings

BATCHES_A_WORKER = 2
"""Number of batches per worker for an estimate; fewer are too noisy."""
RUN_BYTES = 2**20
"""Size of the steps that a worker sends together: a message costs about 1 ms, whatever
its size, and a batch of 13 short rows 0.2 ms."""
MOST_IN_A_RUN = 32
BYTES_A_TOKEN = 40
"""Upper bound over all fields of a batch."""


class WorkerTimes:
    """Batches made by each worker and the seconds spent on them, in shared memory.

    Workers keep loading while evaluations and checkpoints stop the clock, and while the
    first step compiles. Steps that then train on finished batches are faster than the
    loader can sustain. A worker's time per batch does not depend on pauses, and it
    limits the rate that may be reported.
    """

    def __init__(self, num_workers: int) -> None:
        self._least = BATCHES_A_WORKER * num_workers
        self._workers = num_workers
        shared = mmap.mmap(-1, max(1, num_workers) * 2 * np.dtype(np.float64).itemsize)
        self._sums = np.frombuffer(shared, np.float64).reshape(-1, 2)
        self._counted = np.zeros(2)
        self._batch_s = 0.0

    def add(self, worker: int, batches: int, seconds: float) -> None:
        """Add one message's batches; called by workers."""
        self._sums[worker] += (batches, seconds)

    def batch_s(self) -> float:
        """Seconds between two batches if workers never wait, over the batches since the
        last call with enough of them; 0 if unknown or without workers."""
        made, busy_s = self._sums.sum(axis=0) - self._counted
        if made and (made >= self._least or not self._batch_s):
            self._batch_s = float(busy_s / made / self._workers)
            self._counted += (made, busy_s)
        return self._batch_s


MAX_AUTO_WORKERS = 4


def resolve_workers(
    settings: LoaderSettings, is_cuda: bool, ranks_here: int, *, decodes: bool = False
) -> int:
    """Number of workers for `auto`: 0 on a CPU, because a worker needs a core of the
    step (measured: collation is under 1 % of a step); with a GPU up to half of a rank's
    cores, and all of them if rows are decoded."""
    if settings.num_workers != "auto":
        return settings.num_workers
    if not is_cuda:
        return 0
    cores = usable_cores() // max(1, ranks_here)
    if decodes:
        return max(1, cores)
    return max(1, min(MAX_AUTO_WORKERS, cores // 2))


def shared_memory_bytes(
    settings: LoaderSettings, num_workers: int, batch_size: int, max_length: int
) -> int:
    """Bytes of /dev/shm that `num_workers` may fill with the longest rows."""
    batch = BYTES_A_TOKEN * batch_size * max_length
    return batch * num_workers * settings.prefetch_factor


@dataclass
class StepLoader:
    """Iterates over the batches of steps `range(start, stop)`, on the device.

    `wait_s` is the time in seconds for which the last `next` blocked the host.
    """

    data: StepRows
    settings: LoaderSettings
    runtime: Runtime
    start: int
    stop: int
    num_workers: int = 0
    wait_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        ranks, decodes = self.runtime.ranks.local_world_size, self.data.rows.decodes
        self.num_workers = resolve_workers(
            self.settings, self.runtime.is_cuda, ranks, decodes=decodes
        )
        self.times = WorkerTimes(self.num_workers)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield batches and stop the workers at the end. Python's garbage collector
        would end the queues first; each worker would then block this for 5 s."""
        self._batches = self._from_start()
        try:
            while True:
                begin = time.perf_counter()
                batch = next(self._batches, None)
                self.wait_s = time.perf_counter() - begin
                if batch is None:
                    return
                yield batch
        finally:
            self._batches.close()

    def restart(self, data: StepRows, step: int) -> None:
        """Continue with `step`, cut by `data`."""
        self.data, self.start = data, step
        self._batches = self._from_start()

    def _from_start(self) -> Generator[StepBatch]:
        if self.runtime.is_cuda:
            device = self.runtime.device
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            runs = _prefetch_to_device(self._host_runs(side), device, side)
        else:
            runs = self._host_runs()
        for run in runs:
            yield from run

    def _host_runs(self, copies: Any = None) -> Generator[StepRun]:
        """Runs of steps; `copies` is the stream that copies them to a GPU."""
        # Without workers several would be one long wait, and the next ones no wait.
        size = run_steps(self.data) if self.num_workers else 1
        for steps in self._step_ranges():
            if self._in_ring:
                yield from self._from_ring(steps, copies)
            else:
                runs = _cut(steps, size, alone=self.num_workers)
                yield from self._data_loader(_Runs(self.data), runs)

    @property
    def _in_ring(self) -> bool:
        """Return whether workers write batches, of a fixed size, for a GPU to shared
        locked memory."""
        locked = self.settings.pin_memory and self.runtime.is_cuda
        return locked and self.data.rows.row_bytes > 0

    def _from_ring(self, steps: range, copies: Any) -> Generator[StepRun]:
        ahead = max(1, self.num_workers) * self.settings.prefetch_factor
        ring = Ring.of(self.data, ahead)
        rows = RingDataset(self.data, ring)
        made = iter(self._data_loader(rows, ring.numbered(steps)))
        with ring.locked():
            for batch in ring.batches(made, copies):
                yield StepRun.of([batch])

    def _step_ranges(self) -> Iterator[range]:
        """The whole run; or one range per epoch, if workers must not persist."""
        if self.settings.persistent_workers:
            yield range(self.start, self.stop)
            return
        size, begin = len(self.data), self.start
        while begin < self.stop:
            end = min((begin // size + 1) * size, self.stop)
            yield range(begin, end)
            begin = end

    def _data_loader(self, data: Any, steps: Iterable[Any]) -> Any:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {
                "prefetch_factor": self.settings.prefetch_factor,
                "timeout": self.settings.timeout_s,
                "multiprocessing_context": "fork",
            }
        rows: Any = _Timed(data, self.times) if self.num_workers else data
        return DataLoader(
            rows,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            # Else each iteration draws from the generator of dropout, and a resumed run
            # draws other numbers than an uninterrupted one.
            generator=torch.Generator(),
            pin_memory=self.settings.pin_memory and self.runtime.is_cuda,
            **workers,
        )


def run_steps(data: StepRows) -> int:
    """Number of steps that a worker sends together, limited by their size with the
    longest rows. Decoded rows need enough time to be sent one by one."""
    if data.rows.decodes:
        return 1
    return max(1, min(MOST_IN_A_RUN, RUN_BYTES // batch_bytes(data)))


def batch_bytes(data: StepRows) -> int:
    """Maximum size of a step in bytes."""
    row = BYTES_A_TOKEN * data.rows.facts.largest_sample + data.rows.row_bytes
    return int(data.batches.batch_size * row)


def _cut(steps: range, size: int, alone: int) -> Iterator[range]:
    """Runs of `size` steps; the first `alone` runs, for which the training waits and
    which fill the workers' caches, have one step."""
    first = steps[:alone]
    for step in first:
        yield range(step, step + 1)
    for begin in range(steps.start + len(first), steps.stop, size):
        yield range(begin, min(begin + size, steps.stop))


@dataclass(frozen=True)
class _Runs:
    """Map-style data of a DataLoader whose index is a range of steps."""

    data: StepRows

    def __getitem__(self, steps: range) -> StepRun:
        return StepRun.of([self.data[step] for step in steps])


@dataclass
class _Timed:
    """Measures each worker's messages except its first, which fills caches."""

    data: Any
    times: WorkerTimes
    is_first: bool = True

    def __getitem__(self, index: Any) -> Any:
        begin = time.perf_counter()
        batch = self.data[index]
        if not self.is_first:
            worker = get_worker_info().id  # type: ignore[union-attr]
            count = len(index) if isinstance(index, range) else 1
            self.times.add(worker, count, time.perf_counter() - begin)
        self.is_first = False
        return batch


def _prefetch_to_device(
    runs: Iterator[StepRun], device: torch.device, side: torch.cuda.Stream
) -> Generator[StepRun]:
    """Copy the next run's tensors on a side stream while this one computes."""
    ahead: tuple[StepRun, Any] | None = None
    for run in runs:
        with torch.cuda.stream(side):
            moved = run.to(device), side.record_event()
        if ahead is not None:
            yield _ready(*ahead)
        ahead = moved
    if ahead is not None:
        yield _ready(*ahead)


def _ready(run: StepRun, copied: Any) -> StepRun:
    """Let this stream wait for the run's own copy, not for the next one's, and keep the
    memory until it has been used."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    run.buffer.record_stream(current)
    return run
