"""Read sessions of log keys as raw rows with the columns `session`, `text` (the keys,
separated by spaces) and `label` (normal or abnormal; null if unknown). See
`flatout.datasets.LogSessions` for the file formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.data.raw_texts import (
    SHOWN_CHARACTERS,
    BrokenRow,
    RawBatch,
    RawTextsError,
)
from flatout.engine.data.readers.file_reader import files_below, readable
from flatout.engine.data.readers.text_files import reader_of
from flatout.engine.data.sessions.grouping import (
    ABNORMAL,
    COLUMNS,
    NORMAL,
    LogColumns,
    SessionFilter,
    group_lines,
    read_labels,
)
from flatout.engine.files.content_key import files_hash


@dataclass(frozen=True)
class LogSessions:
    """A raw text source of log sessions. If `abnormal` is set, all sessions in this
    file are abnormal, and all sessions in `path` are normal."""

    path: Path
    abnormal: Path | None = None
    labels: Path | None = None
    """A file with the name and the label of one session per line."""
    columns: LogColumns = field(default_factory=LogColumns)
    selection: SessionFilter = field(default_factory=SessionFilter)

    @property
    def column_names(self) -> list[str]:
        return list(COLUMNS)

    def digest(self, columns: Sequence[str]) -> str:
        """Return a digest of the files and of the options for reading them. Raises
        RawTextsError if a file cannot be read."""
        options = [list(columns), asdict(self.columns), asdict(self.selection)]
        given = [path for path in (self.path, self.abnormal, self.labels) if path]
        named = [(f"\0{f.name}\0", f) for path in given for f in _files(path)]
        with readable(self.path):
            return files_hash(json.dumps(options), named)

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        """Yield the selected sessions of each file, ordered by their first lines."""
        yield from self._of(self.path, NORMAL if self.abnormal else None, columns)
        if self.abnormal:
            yield from self._of(self.abnormal, ABNORMAL, columns)

    def _of(
        self, path: Path, label: str | None, columns: Sequence[str]
    ) -> Iterator[RawBatch]:
        for file in _files(path):
            read = reader_of(file) is not None
            found = group_lines(file, self.columns) if read else _lines_of_keys(file)
            sessions, broken = found
            if label is not None:
                sessions["label"] = label
            elif self.labels is not None:
                sessions, unlabelled = self._labelled(sessions, self.labels)
                broken += unlabelled
            taken = self.selection.mask(sessions["session"], sessions["label"])
            own = sessions[taken]
            arrays = {
                name: pa.array([v or None for v in own[name]], pa.string())
                for name in columns
            }
            broken.sort(key=lambda fault: fault.row)
            yield RawBatch(
                file.name, own["row"].to_numpy(np.int64), arrays, broken=broken
            )

    def _labelled(self, sessions: Any, labels: Path) -> tuple[Any, list[BrokenRow]]:
        """Return the sessions that have a label in the file `labels`, with this label,
        and the other sessions as broken rows."""
        sessions["label"] = sessions["session"].map(read_labels(labels))
        missing = sessions["label"].isna()
        lost = zip(*(sessions.loc[missing, n] for n in ("row", "session")), strict=True)
        reason = f"session has no label in {labels.name}"
        return sessions[~missing], [BrokenRow(row, reason, name) for row, name in lost]


def _files(path: Path) -> list[Path]:
    found = files_below(path)
    if not found:
        raise RawTextsError(f"{path} has no file: set the filepath of the entry")
    if len(found) > 1 and any(map(reader_of, found)):
        raise RawTextsError(
            f"{path} has {len(found)} files, and a session may have lines in "
            "several of them: join them to one file"
        )
    return found


def _lines_of_keys(file: Path) -> tuple[Any, list[BrokenRow]]:
    """Read a file with the keys of one session per line, and return the same values as
    `group_lines`. The name of a session is the file name with the line number."""
    import pandas as pd

    found, broken = [], []
    with readable(file), file.open("rb") as stream:
        for row, line in enumerate(stream):
            try:
                keys = line.decode().split()
            except UnicodeDecodeError:
                shown = repr(line[:SHOWN_CHARACTERS])
                broken.append(BrokenRow(row, "line is not valid UTF-8", shown))
                continue
            if keys:
                found.append((f"{file.name}:{row + 1}", row, " ".join(keys), None))
            else:
                broken.append(BrokenRow(row, "session has no key", ""))
    if not found and not broken:
        raise RawTextsError(
            f"{file} is empty (0 bytes): set the filepath of the entry, or give it "
            "sessions"
        )
    return pd.DataFrame(found, columns=["session", "row", "text", "label"]), broken
