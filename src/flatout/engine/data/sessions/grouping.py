"""Lines of a structured log, put together by session."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.data.columns import listed
from flatout.engine.data.raw_texts import (
    SHOWN_CHARACTERS,
    BrokenRow,
    RawBatch,
    RawTextsError,
    name_of,
)
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.sessions.parts import ABNORMAL, COLUMNS, NORMAL, label_of


@dataclass(frozen=True)
class LogColumns:
    """Which column of a structured log is what; loghub's HDFS by default."""

    key: str = "EventId"
    session: str = "Content"
    pattern: str | None = r"blk_-?\d+"
    """What of `session` names the session, or several; None: all of it."""
    label: str | None = None
    """Says of a line whether it is normal; a session is where all its lines are."""


@dataclass
class Grouped:
    """Sessions of one file, in the order of their first lines."""

    source: str
    names: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each session its first line's, from 0."""
    texts: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    broken: list[BrokenRow] = field(default_factory=list)

    def add(self, name: str, row: int, text: str, label: str | None = None) -> None:
        """One more session."""
        self.names.append(name)
        self.rows.append(row)
        self.texts.append(text)
        self.labels.append(label)

    def labelled(self, known: Mapping[str, str], file: str) -> Grouped:
        """With labels by name; sessions that have none there cannot be used."""
        found = Grouped(self.source, broken=list(self.broken))
        for at, name in enumerate(self.names):
            if name in known:
                found.add(name, self.rows[at], self.texts[at], known[name])
            else:
                reason = f"session has no label in {file}"
                found.broken.append(BrokenRow(self.rows[at], reason, name))
        return found

    def arrays(self, chosen: list[int]) -> dict[str, Any]:
        """Arrow columns of some sessions."""
        values: list[list[Any]] = [self.names, self.texts, self.labels]
        return {
            name: pa.array([column[at] for at in chosen], pa.string())
            for name, column in zip(COLUMNS, values, strict=True)
        }


def group_lines(file: Path, columns: LogColumns) -> Grouped:
    """Raises RawTextsError where a column is not there or no line has a session."""
    reader = TextFiles(file)
    _check_columns(reader, columns)
    found = Grouped(file.name)
    texts: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    abnormal: set[str] = set()
    for line in _lines(reader, columns, found.broken):
        for name in line.sessions:
            texts.setdefault(name, []).append(line.key)
            first.setdefault(name, line.row)
            if line.label == ABNORMAL:
                abnormal.add(name)
    if not texts:
        raise RawTextsError(_no_session(file, columns, found.broken))
    for name, keys in texts.items():
        known = ABNORMAL if name in abnormal else NORMAL
        label = known if columns.label is not None else None
        found.add(name, first[name], " ".join(keys), label)
    return found


@dataclass(frozen=True)
class _Line:
    row: int
    key: str
    sessions: list[str]
    label: str | None


def _lines(
    reader: TextFiles, columns: LogColumns, broken: list[BrokenRow]
) -> Iterator[_Line]:
    """Lines that can be used; the others go to `broken`."""
    wanted = [columns.key, columns.session, columns.label]
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    find = re.compile(columns.pattern) if columns.pattern else None
    for batch in reader.batches(names):
        broken += batch.broken
        keys, sources = (_texts(batch, name) for name in wanted[:2] if name)
        labels = _texts(batch, columns.label) if columns.label else [""] * len(keys)
        for row, key, source, label in zip(
            batch.rows.tolist(), keys, sources, labels, strict=True
        ):
            named = _sessions(source, find)
            if not key.strip():
                fault = BrokenRow(row, f"{columns.key} is empty", _shown(source))
                broken.append(fault)
            elif not named:
                reason = f"{columns.session} names no session"
                broken.append(BrokenRow(row, reason, _shown(source)))
            else:
                yield _Line(row, "_".join(key.split()), named, label_of(label))


def _texts(batch: RawBatch, name: str) -> list[str]:
    """Values as text; nothing for what is missing."""
    values = batch.columns[name].to_pylist()
    return ["" if value is None else name_of(value) for value in values]


def _sessions(source: str, find: re.Pattern[str] | None) -> list[str]:
    """Each once: a line that names a session twice is one of its lines."""
    found = [source.strip()] if find is None else [m[0] for m in find.finditer(source)]
    return list(dict.fromkeys(name for name in found if name))


def _shown(text: str) -> str:
    return text[:SHOWN_CHARACTERS]


def _check_columns(reader: TextFiles, columns: LogColumns) -> None:
    present = reader.column_names
    wanted = {
        "key_column": columns.key,
        "session_column": columns.session,
        "label_column": columns.label,
    }
    for option, name in wanted.items():
        if name is not None and present.count(name) != 1:
            near = difflib.get_close_matches(name, present, n=1, cutoff=0.4)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise RawTextsError(
                f"{reader.path} has the columns {listed(present)}; {option} is "
                f"{name!r}, which is not there once{hint}. Set {option} of the entry "
                "(conf/local/catalog.yml)"
            )


def _no_session(file: Path, columns: LogColumns, broken: list[BrokenRow]) -> str:
    example = f", as {broken[0].excerpt!r}" if broken else ""
    if columns.pattern is None:
        return f"{file}: no line has a session: {columns.session} is empty in each"
    return (
        f"{file}: session_pattern {columns.pattern!r} is found in no line of "
        f"{columns.session}{example}. Set session_pattern of the entry in "
        "conf/local/catalog.yml; null takes the whole column"
    )
