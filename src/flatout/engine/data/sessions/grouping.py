"""Group the lines of a structured log by session, read session labels, and select the
sessions for training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.data.columns import column_faults, listed
from flatout.engine.data.raw_texts import (
    SHOWN_CHARACTERS,
    BrokenRow,
    RawBatch,
    RawTextsError,
    name_of,
)
from flatout.engine.data.readers.text_files import TextFiles

NORMAL, ABNORMAL = "normal", "abnormal"
NORMAL_NAMES = frozenset({"normal", "-", "0", "0.0", "false", "no"})
"""Labels that mark a session or a line of a log as normal. In the logs of loghub, HDFS
uses Normal, and BGL uses -."""
SEED = 1
"""Seed for hashing session names. Splits hash the same names without this seed, so that
a session's split is independent of whether it belongs to `train` or `rest`."""
COLUMNS = ("session", "text", "label")
Part = Literal["all", "train", "rest"]


@dataclass(frozen=True)
class SessionFilter:
    """Selects sessions by a hash of their names. The part `train` contains the normal
    sessions among a random fraction `share` of all, and `rest` all other sessions."""

    part: Part = "all"
    share: float = 0.8

    def mask(
        self, names: Sequence[str], labels: Sequence[str | None]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask (N,) of the sessions that are in this part."""
        if self.part == "all":
            return np.ones(len(names), dtype=bool)
        hashes = [xxhash.xxh3_64_intdigest(name.encode(), SEED) for name in names]
        places = np.array(hashes, np.uint64).astype(np.float64) / 2.0**64
        normal = np.array([label != ABNORMAL for label in labels], dtype=bool)
        in_train: npt.NDArray[np.bool_] = (places < self.share) & normal
        return in_train if self.part == "train" else ~in_train


def label_of(value: str) -> str:
    """Return `normal` or `abnormal` for the label `value` of a log."""
    return NORMAL if value.strip().casefold() in NORMAL_NAMES else ABNORMAL


def read_labels(path: Path) -> dict[str, str]:
    """Read a file with two columns, the session name and the label. Return `normal` or
    `abnormal` by session name. Raises RawTextsError if there are not two columns."""
    reader = TextFiles(path)
    columns = reader.column_names
    if len(columns) != 2:
        raise RawTextsError(
            f"{path} has the columns {listed(columns)}; a file of labels has two, the "
            "session's name and its label (Normal or Anomaly)"
        )
    found: dict[str, str] = {}
    for batch in reader.batches(columns):
        names, labels = (batch.columns[column].to_pylist() for column in columns)
        for name, label in zip(names, labels, strict=True):
            if name is not None and label is not None:
                found[name_of(name)] = label_of(name_of(label))
    return found


ENTRY = "conf/local/catalog.yml"


@dataclass(frozen=True)
class LogColumns:
    """Columns of a structured log. The defaults fit loghub's HDFS log."""

    key: str = "EventId"
    session: str = "Content"
    pattern: str | None = r"blk_-?\d+"
    """Regular expression that matches the session names in the session column. If None,
    the whole value is the name."""
    label: str | None = None
    """Column with each line's label. A session is normal if all its lines are
    normal."""


def group_lines(file: Path, columns: LogColumns) -> tuple[Any, list[BrokenRow]]:
    """Return a DataFrame of sessions, ordered by `row` (the row number of the first
    line), with the further columns `session`, `text` and `label`, and the unusable
    lines. Raises RawTextsError if a column is missing or no line has a session."""
    reader = TextFiles(file)
    _check_columns(reader, columns)
    lines, broken = _lines(reader, columns)
    no_key, no_session = lines["key"] == "", lines["sessions"].str.len() == 0
    for mask, reason in (
        (no_key, f"{columns.key} is empty"),
        (no_session & ~no_key, f"{columns.session} names no session"),
    ):
        bad = lines[mask]
        for row, source in zip(bad["row"], bad["source"], strict=True):
            broken.append(BrokenRow(row, reason, source[:SHOWN_CHARACTERS]))
    good = lines[~(no_key | no_session)].explode("sessions")
    if good.empty:
        raise RawTextsError(_no_session(file, columns, broken))
    found = good.groupby("sessions", sort=False).agg(
        row=("row", "first"), text=("key", " ".join), abnormal=("abnormal", "any")
    )
    labels = found["abnormal"].map({True: ABNORMAL, False: NORMAL})
    found["label"] = labels if columns.label is not None else None
    return found.rename_axis("session").reset_index(), broken


def _lines(reader: TextFiles, columns: LogColumns) -> tuple[Any, list[BrokenRow]]:
    """Return a DataFrame of lines with the columns `row`, `key`, `source`, `sessions`
    (a list) and `abnormal`, and the lines that could not be parsed."""
    import pandas as pd

    wanted = [columns.key, columns.session, columns.label]
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    parts, broken = [], []
    for batch in reader.batches(names):
        broken += batch.broken
        keys = _texts(batch, columns.key)
        labels = _texts(batch, columns.label) if columns.label else [NORMAL] * len(keys)
        part = {
            "row": batch.rows,
            "key": ["_".join(key.split()) for key in keys],
            "source": _texts(batch, columns.session),
            "abnormal": [label_of(label) == ABNORMAL for label in labels],
        }
        parts.append(pd.DataFrame(part))
    lines = pd.concat(parts, ignore_index=True)
    find = re.compile(columns.pattern) if columns.pattern else None
    lines["sessions"] = [_sessions(source, find) for source in lines["source"]]
    return lines, broken


def _texts(batch: RawBatch, name: str) -> list[str]:
    """Return the values of a column as text, with "" for missing values."""
    values = batch.columns[name].to_pylist()
    return ["" if v is None or v != v else name_of(v) for v in values]  # noqa: PLR0124


def _sessions(source: str, find: re.Pattern[str] | None) -> list[str]:
    """Return the distinct session names in `source`, the session column of a line."""
    found = [source.strip()] if find is None else [m[0] for m in find.finditer(source)]
    return list(dict.fromkeys(name for name in found if name))


def _check_columns(reader: TextFiles, columns: LogColumns) -> None:
    present = reader.column_names
    wanted = {
        "key_column": columns.key,
        "session_column": columns.session,
        "label_column": columns.label,
    }
    advice = f"Set the names in the entry ({ENTRY})"
    if faults := column_faults(present, wanted, "raw_sessions", advice):
        raise RawTextsError(
            f"{reader.path} has the columns {listed(present)}. {faults}"
        )


def _no_session(file: Path, columns: LogColumns, broken: list[BrokenRow]) -> str:
    example = f", such as {broken[0].excerpt!r}" if broken else ""
    if columns.pattern is None:
        return f"{file}: no line has a session: {columns.session} is empty in each"
    return (
        f"{file}: session_pattern {columns.pattern!r} is found in no line of "
        f"{columns.session}{example}. Set session_pattern of the entry in "
        f"{ENTRY}; null uses the whole column"
    )
