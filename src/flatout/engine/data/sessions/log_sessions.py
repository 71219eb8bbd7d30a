"""Sessions of log keys as raw rows: `session`, `text` (its keys, spaces between them)
and `label` (normal, abnormal; null where nobody knows).

A file that is structured (CSV, JSON lines, Parquet, Arrow) has a line of the log a row,
as loghub's `*_structured.csv` has; its lines are put together by session. Any other
file has a session a line, keys separated by spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from flatout.engine.data.raw_texts import (
    BATCH_ROWS,
    SHOWN_CHARACTERS,
    BrokenRow,
    RawBatch,
    RawTextsError,
)
from flatout.engine.data.readers.file_reader import add_bytes, files_of, readable
from flatout.engine.data.readers.text_files import reader_of
from flatout.engine.data.sessions.grouping import Grouped, LogColumns, group_lines
from flatout.engine.data.sessions.parts import (
    ABNORMAL,
    COLUMNS,
    NORMAL,
    Deal,
    read_labels,
)


@dataclass(frozen=True)
class LogSessions:
    """A reader for `open_raw_texts`. Sessions of `abnormal` are all abnormal, and
    those of `path` normal where it is given."""

    path: Path
    abnormal: Path | None = None
    labels: Path | None = None
    """A file with a line a session: its name and its label."""
    columns: LogColumns = field(default_factory=LogColumns)
    deal: Deal = field(default_factory=Deal)

    @property
    def column_names(self) -> list[str]:
        return list(COLUMNS)

    def digest(self, columns: Sequence[str]) -> str:
        """Hash of the files and of how they are read. Raises RawTextsError."""
        options = [list(columns), asdict(self.columns), asdict(self.deal)]
        state = xxhash.xxh3_128(json.dumps(options).encode())
        for path in (self.path, self.abnormal, self.labels):
            for file in [] if path is None else _files(path):
                state.update(f"\0{file.name}\0".encode())
                add_bytes(state, file)
        return str(state.hexdigest())

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        """Sessions in the order of their first lines."""
        if self.abnormal is None:
            yield from self._of(self.path, None, columns)
        else:
            yield from self._of(self.path, NORMAL, columns)
            yield from self._of(self.abnormal, ABNORMAL, columns)

    def _of(
        self, path: Path, label: str | None, columns: Sequence[str]
    ) -> Iterator[RawBatch]:
        known = {} if self.labels is None else read_labels(self.labels)
        for file in _files(path):
            if reader_of(file):
                grouped = group_lines(file, self.columns)
            else:
                grouped = _lines_of_keys(file)
            if label is not None:
                grouped.labels = [label] * len(grouped.names)
            elif self.labels is not None:
                grouped = grouped.labelled(known, self.labels.name)
            yield from _batches(grouped, self.deal, columns)


def _files(path: Path) -> list[Path]:
    inside = files_of(path)
    if not path.is_dir():
        return inside
    found = [p for p in inside if not p.name.startswith((".", "_"))]
    if not found:
        raise RawTextsError(f"{path} holds no file: set the filepath of the entry")
    if len(found) > 1 and any(map(reader_of, found)):
        raise RawTextsError(
            f"{path} holds {len(found)} files, and a session may have lines in "
            "several: put them together in one file"
        )
    return found


def _lines_of_keys(file: Path) -> Grouped:
    """A session a line. Its name is the file's with the number of the line."""
    found = Grouped(file.name)
    with readable(file), file.open("rb") as stream:
        for row, line in enumerate(stream):
            try:
                keys = line.decode().split()
            except UnicodeDecodeError:
                shown = repr(line[:SHOWN_CHARACTERS])
                found.broken.append(BrokenRow(row, "line is not valid UTF-8", shown))
                continue
            if keys:
                found.add(f"{file.name}:{row + 1}", row, " ".join(keys))
            else:
                found.broken.append(BrokenRow(row, "session has no key", ""))
    if not found.names and not found.broken:
        raise RawTextsError(
            f"{file} is empty (0 bytes): set the filepath of the entry, or give it "
            "sessions"
        )
    return found


def _batches(grouped: Grouped, deal: Deal, columns: Sequence[str]) -> Iterator[Any]:
    """At most BATCH_ROWS sessions each; broken lines before the row behind them."""
    taken = np.flatnonzero(deal.takes(grouped.names, grouped.labels))
    broken, told = sorted(grouped.broken, key=lambda fault: fault.row), 0
    for start in range(0, max(1, len(taken)), BATCH_ROWS):
        own = taken[start : start + BATCH_ROWS].tolist()
        last = start + BATCH_ROWS >= len(taken)
        rows = np.array([grouped.rows[at] for at in own], np.int64)
        until = len(broken) if last else _before(broken, int(rows[-1]))
        arrays = grouped.arrays(own)
        yield RawBatch(
            grouped.source,
            rows,
            {name: arrays[name] for name in columns},
            broken=broken[told:until],
        )
        told = until


def _before(broken: Sequence[BrokenRow], row: int) -> int:
    return int(np.searchsorted([fault.row for fault in broken], row))


def table_of(names: list[str], texts: list[str], labels: list[str | None]) -> Any:
    """Arrow table of sessions."""
    values = (names, texts, labels)
    pairs = zip(COLUMNS, values, strict=True)
    return pa.table({name: pa.array(column, pa.string()) for name, column in pairs})
