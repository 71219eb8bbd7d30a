"""Checked rows: the usable raw rows, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    Mask,
    read_group,
    read_label,
    read_score,
    read_text,
)
from flatout.engine.data.columns import Columns, excerpt
from flatout.engine.data.forms import (
    ColumnCheck,
    read_flags,
    read_messages,
    read_pairs,
    read_tagged,
)
from flatout.engine.data.given_splits import read_splits
from flatout.engine.data.raw_texts import RawBatch

LOWEST_SCORE = {"pairs": -1, "ranking": 0}
"""Lowest label of forms whose labels are scores; the highest is 1."""
NOTHING = ("", "None", "nan")
"""Excerpts that show no value."""

REJECTED_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
        ("reason", pa.string()),
        ("excerpt", pa.string()),
    ]
)


@dataclass(frozen=True)
class CheckedBatch:
    """Usable rows with canonical columns, and the rejected rows."""

    table: Any
    """RecordBatch with `Columns.row_schema`, N rows."""
    good: Mask
    """(raw rows,) mask of the raw rows of the batch that are in `table`."""
    groups: Any | None
    rejected: Any
    """RecordBatch with REJECTED_SCHEMA."""
    splits: npt.NDArray[np.int8]
    """(N,) indices of the splits among train, validation and test; -1: not given."""


def check_batch(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Check each row of `batch`; the first reason that applies is reported."""
    arrays, checks = _values(batch, columns)
    groups = None
    if columns.group:
        groups, found = read_group(batch, columns.group)
        checks += _of(columns.group, found)
    splits = np.full(len(batch.rows), batch.split, np.int8)
    if columns.split:
        splits, found = read_splits(batch, columns.split)
        checks += _of(columns.split, found)
    nothing = np.zeros(len(batch.rows), bool)
    good = ~np.logical_or.reduce([nothing, *(mask for _, (mask, _) in checks)])
    arrays = [*arrays, pa.array(batch.rows)]
    table = pa.RecordBatch.from_arrays(arrays, schema=columns.row_schema)
    chosen = pa.array(good)
    return CheckedBatch(
        table=table.filter(chosen),
        good=good,
        groups=None if groups is None else groups.filter(chosen),
        rejected=_rejected(batch, checks, columns.text),
        splits=splits[good],
    )


def _values(batch: RawBatch, columns: Columns) -> tuple[list[Any], list[ColumnCheck]]:
    """Return the columns of `row_schema` without `source_row`, and their errors."""
    arrays: list[Any] = []
    checks: list[ColumnCheck] = []
    if columns.form == "words":
        *arrays, checks = read_tagged(batch, columns.text, str(columns.label))
        return arrays, checks
    if columns.form == "messages":
        *arrays, found = read_messages(batch, columns.text)
        return arrays, _of(columns.text, found)
    if columns.form == "pairs":
        named = columns.text, str(columns.positive), columns.negative
        *arrays, checks = read_pairs(batch, *named)
    else:
        for name in filter(None, (columns.text, columns.text_pair, columns.completion)):
            text, found = read_text(batch, name)
            arrays, checks = [*arrays, text], checks + _of(name, found)
    if columns.label:
        if (lowest := LOWEST_SCORE.get(columns.form)) is not None:
            label, found = read_score(batch, columns.label, lowest)
        else:
            label, found = read_label(batch, columns.label, columns.label_type)
        arrays, checks = [*arrays, label], checks + _of(columns.label, found)
    if columns.flags:
        label, flaws = read_flags(batch, columns.flags)
        arrays, checks = [*arrays, label], checks + flaws
    return arrays, checks


def _of(column: str, checks: list[Check]) -> list[ColumnCheck]:
    return [(column, check) for check in checks]


def _rejected(batch: RawBatch, checks: list[ColumnCheck], text_column: str) -> Any:
    """Return the rows of the quarantine file, in row order."""
    faults: dict[int, tuple[str, str]] = {}
    for column, (mask, reason) in reversed(checks):  # the first check wins
        at = np.flatnonzero(mask).tolist()
        faults.update(dict.fromkeys(at, (column, reason)))
    found = []
    for index, (column, reason) in sorted(faults.items()):
        # The wrong value, or the row's text if that value is empty.
        values = [excerpt(batch.columns[name][index]) for name in (column, text_column)]
        shown = values[0] if values[0].strip() not in NOTHING else values[1]
        found.append((batch.source, int(batch.rows[index]), reason, shown))
    found += [(batch.source, b.row, b.reason, b.excerpt) for b in batch.broken]
    found.sort(key=itemgetter(1))  # parts of a row keep their order
    return rejected_batch(found)


def rejected_batch(found: Sequence[tuple[str, int, str, str]]) -> Any:
    """RecordBatch of REJECTED_SCHEMA from (source, row, reason, excerpt)."""
    names = REJECTED_SCHEMA.names
    rows = [dict(zip(names, one, strict=True)) for one in found]
    return pa.RecordBatch.from_pylist(rows, REJECTED_SCHEMA)
