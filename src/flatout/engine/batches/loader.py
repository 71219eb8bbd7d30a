"""Load steps in worker processes and copy them to the device.

The dataset is indexed by the step. One DataLoader therefore serves the whole run
without a pause between epochs, and a resumed run need not skip earlier batches.
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
from flatout.engine.rows.rows import TokenRowsError

BATCHES_A_WORKER = 2
"""The minimum number of batches per worker for a sufficiently precise estimate."""
RUN_BYTES = 2**20
"""The maximum size in bytes of the steps in one message. Sending a message takes about
1 ms regardless of its size, but building a batch of 13 short rows takes only 0.2 ms."""
MOST_IN_A_RUN = 32
BYTES_A_TOKEN = 40
"""Upper bound on the bytes per token, summed over all fields of a batch."""


class WorkerTimes:
    """Counts the batches of each worker, and the time spent on them, in shared memory.
    Workers keep loading while training pauses, so the next steps run faster than the
    loader can sustain. The time that a worker spends on a batch does not depend on
    pauses, so it sets an upper limit on the reported throughput."""

    def __init__(self, num_workers: int) -> None:
        self._least = BATCHES_A_WORKER * num_workers
        self._workers = num_workers
        shared = mmap.mmap(-1, max(1, num_workers) * 2 * np.dtype(np.float64).itemsize)
        self._sums = np.frombuffer(shared, np.float64).reshape(-1, 2)
        self._counted = np.zeros(2)
        self._batch_s = 0.0

    def add(self, worker: int, batches: int, seconds: float) -> None:
        """Record the batches of one message. Worker processes call this method."""
        self._sums[worker] += (batches, seconds)

    def batch_s(self) -> float:
        """Return the average seconds per batch if all workers are always busy, or 0 if
        it is unknown. The estimate is updated whenever there are enough new batches."""
        made, busy_s = self._sums.sum(axis=0) - self._counted
        if made and (made >= self._least or not self._batch_s):
            self._batch_s = float(busy_s / made / self._workers)
            self._counted += (made, busy_s)
        return self._batch_s


MAX_AUTO_WORKERS = 4


def resolve_workers(
    settings: LoaderSettings, is_cuda: bool, ranks_here: int, *, decodes: bool = False
) -> int:
    """Return the number of workers per rank. On a CPU, `auto` is 0, because a worker
    would take a core from the training step. On a GPU, `auto` is half of the rank's
    cores, at most MAX_AUTO_WORKERS, or all of its cores if rows have to be decoded."""
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
    """Return how many bytes of /dev/shm the workers need at most, for batches of
    `batch_size` rows with `max_length` tokens."""
    batch = BYTES_A_TOKEN * batch_size * max_length
    return batch * num_workers * settings.prefetch_factor


@dataclass
class StepLoader:
    """Iterates over the batches of the steps `range(start, stop)`, on the device.
    Training waited `wait_s` seconds for the latest one."""

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
        """Yield the batches, then stop the workers. The garbage collector would close
        the queues before stopping the workers, and block for 5 s per worker."""
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
        """Continue at `step` with batches from `data`."""
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
        """Yield groups of consecutive steps in host memory. The CUDA stream `copies`
        copies them to the GPU."""
        # Without workers, training would wait until all steps of a group are built.
        size = run_steps(self.data) if self.num_workers else 1
        # Batches of a fixed size reach the GPU through shared, page-locked memory.
        locked = self.settings.pin_memory and self.runtime.is_cuda
        in_ring = locked and self.data.rows.row_bytes > 0
        for steps in self._step_ranges():
            if in_ring:
                yield from self._from_ring(steps, copies)
            else:
                runs = _cut(steps, size, alone=self.num_workers)
                yield from self._data_loader(_Runs(self.data), runs)

    def _from_ring(self, steps: range, copies: Any) -> Generator[StepRun]:
        ahead = max(1, self.num_workers) * self.settings.prefetch_factor
        ring = Ring.of(self.data, ahead)
        rows = RingDataset(self.data, ring)
        made = self._data_loader(rows, ring.numbered(steps))
        with ring.locked():
            for batch in ring.batches(made, copies):
                yield StepRun.of([batch])

    def _step_ranges(self) -> Iterator[range]:
        """Yield one range of steps, or one per epoch if workers are not persistent."""
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
        loader: Any = DataLoader(
            rows,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            # The default would advance the global generator in each iteration, so that
            # dropout in a resumed run would differ from that in an uninterrupted run.
            generator=torch.Generator(),
            pin_memory=self.settings.pin_memory and self.runtime.is_cuda,
            **workers,
        )
        return _raising(loader) if self.num_workers else loader


def run_steps(data: StepRows) -> int:
    """Return how many steps a worker sends in one message, so that they fit RUN_BYTES.
    Steps with decoded rows are sent one by one, because decoding is slow."""
    if data.rows.decodes:
        return 1
    row = BYTES_A_TOKEN * data.rows.facts.largest_sample + data.rows.row_bytes
    step_bytes = int(data.batches.batch_size * row)
    return max(1, min(MOST_IN_A_RUN, RUN_BYTES // step_bytes))


def _cut(steps: range, size: int, alone: int) -> Iterator[range]:
    """Split `steps` into ranges of `size` steps. The first `alone` ranges are single
    steps, because workers are slow at first."""
    first = steps[:alone]
    for step in first:
        yield range(step, step + 1)
    for begin in range(steps.start + len(first), steps.stop, size):
        yield range(begin, min(begin + size, steps.stop))


@dataclass(frozen=True)
class _Runs:
    """A map-style dataset of `StepRun` objects, indexed by ranges of steps."""

    data: StepRows

    def __getitem__(self, steps: range) -> StepRun:
        return StepRun.of([self.data[step] for step in steps])


def _raising(found: Iterable[Any]) -> Generator[Any]:
    """Yield the batches of workers. Raises the TokenRowsError that a worker returns."""
    for one in found:
        if isinstance(one, TokenRowsError):
            raise one
        yield one


@dataclass
class _Timed:
    """Times each worker's messages except the first one, which fills its caches."""

    data: Any
    times: WorkerTimes
    is_first: bool = True

    def __getitem__(self, index: Any) -> Any:
        begin = time.perf_counter()
        try:
            batch = self.data[index]
        except TokenRowsError as error:
            return error  # PyTorch would add the worker's traceback to the message
        if not self.is_first:
            worker = get_worker_info().id  # type: ignore[union-attr]
            count = len(index) if isinstance(index, range) else 1
            self.times.add(worker, count, time.perf_counter() - begin)
        self.is_first = False
        return batch


def _prefetch_to_device(
    runs: Iterator[StepRun], device: torch.device, side: torch.cuda.Stream
) -> Generator[StepRun]:
    """Yield `runs` on the device, copied in advance on the stream `side`."""
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
    """Make the current stream wait for the copy of `run`, but not for that of the next.
    The memory is not reused before the stream has finished with it."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    run.buffer.record_stream(current)
    return run
