"""How rows are dealt out for encoding: in small tasks, to as many processes as pay."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.machine.environment import usable_cores
from flatout.engine.tokenizing.encoders.encoding import read_rows
from flatout.engine.tokenizing.encoders.plain_encoder import (
    CHARACTERS_PER_TOKEN,
    EncodeOptions,
)

UNIT_BYTES = 1 << 20
"""Text that is encoded at a time: small, so that no core waits for another."""
UNIT_ROWS = 20_000
PROCESS_START_S = 0.35
THREADS_GAIN = 0.6
"""Measured: when a helper process is ready; what one more core gives Rust's threads."""
Slice = tuple[str, int, int]
"""A file, and its rows from one number to another."""


@contextmanager
def row_files(rows: Any) -> Iterator[list[str]]:
    """Arrow stream files that hold `rows`: its own, or a temporary one."""
    files = [entry["filename"] for entry in rows.cache_files]
    # A part of a Dataset still names the files of the whole.
    if files and sum(read_rows(file).num_rows for file in files) == len(rows):
        yield files
        return
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "rows.arrow"))
        table = rows.data.table
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        yield [file]


def plan_tasks(file: str, options: EncodeOptions) -> list[Slice]:
    """Cut the rows of a file into tasks of about UNIT_BYTES to encode."""
    table = read_rows(file)
    cost = _cost_bytes(table.column("text"), options)
    if options.has_pair:
        cost = cost + _cost_bytes(table.column("text_pair"), options)
    ends = np.cumsum(cost)
    tasks, start = [], 0
    while start < len(cost):
        done = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, done + UNIT_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + UNIT_ROWS)
        tasks.append((file, start, stop))
        start = stop
    return tasks


def _cost_bytes(texts: Any, options: EncodeOptions) -> npt.NDArray[np.int64]:
    """Bytes (N,) of each text that will be looked at."""
    lengths: npt.NDArray[np.int64] = pc.binary_length(texts).to_numpy().astype(np.int64)
    if options.join:
        return lengths
    return np.minimum(lengths, CHARACTERS_PER_TOKEN * options.max_length)


def choose_processes(task_s: float, tasks_left: int, knows_words: bool) -> int:
    """Processes that are done first, by the measured time of one task on one core.

    n of them need about PROCESS_START_S * (1 + n / cores) to start and work / n after
    that. One means this process: rows of known words take one core of it, the plain
    tokenizer's threads all cores, but they wait while Python copies the ids out.
    """
    cores = usable_cores()
    work_s = task_s * tasks_left
    times = {
        n: PROCESS_START_S * (1 + n / cores) + work_s / n for n in range(2, cores + 1)
    }
    times[1] = work_s / (1 if knows_words else 1 + THREADS_GAIN * (cores - 1))
    return min(times, key=times.__getitem__)
