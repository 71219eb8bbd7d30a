"""Validate raw rows, and explain why rows are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.column_checks import (
    Faults,
    Mask,
    read_group,
    read_label,
    read_score,
    read_text,
)
from flatout.engine.data.columns import Columns, excerpt
from flatout.engine.data.forms import (
    read_flags,
    read_messages,
    read_pairs,
    read_tagged,
)
from flatout.engine.data.given_splits import read_splits
from flatout.engine.data.raw_texts import RawBatch

LOWEST_SCORE = {"pairs": -1, "ranking": 0}
"""The lowest valid score for each form whose labels are scores. The highest is 1."""
NOTHING = ("", "None", "nan")
"""Excerpts of missing values. They are not shown in messages."""

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
    """The N usable rows of a batch, with its columns renamed and converted to
    `Columns.row_schema`, and the rejected rows."""

    table: Any
    """The usable rows as a RecordBatch with the schema `Columns.row_schema`."""
    good: Mask
    """Mask over all raw rows, which is True for the rows that are in `table`."""
    groups: Any | None
    rejected: Any
    """The rejected rows as a RecordBatch with REJECTED_SCHEMA."""
    splits: npt.NDArray[np.int8]
    """Index of each row's given split in SPLITS (N,), or -1 if none is given."""


def with_broken_rows(batch: RawBatch) -> tuple[RawBatch, dict[int, str]]:
    """Return `batch` with missing values in place of each broken row, and a mapping
    from the index of each broken row to the reason."""
    if not batch.broken:
        return batch, {}
    reasons = {fault.row: fault.reason for fault in reversed(batch.broken)}
    rows = np.union1d(batch.rows, np.array([*reasons], np.int64))
    broken = np.isin(rows, [*reasons])
    places = pa.array(np.searchsorted(batch.rows, rows), mask=broken)
    columns = {name: column.take(places) for name, column in batch.columns.items()}
    kinds = {name: np.zeros(len(rows), np.uint8) for name in batch.kinds}
    for name, found in kinds.items():
        found[~broken] = batch.kinds[name]
    faults = {n: reasons[int(rows[n])] for n in np.flatnonzero(broken).tolist()}
    return replace(batch, rows=rows, columns=columns, kinds=kinds, broken=[]), faults


def check_batch(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Validate each row of `batch`, and return the usable rows and the rejected rows.
    Only the first problem of a row is reported."""
    faults = Faults()
    arrays = [*_values(batch, columns, faults), pa.array(batch.rows)]
    groups = read_group(batch, columns.group, faults) if columns.group else None
    splits = np.full(len(batch.rows), batch.split, np.int8)
    if columns.split:
        splits = read_splits(batch, columns.split, faults)
    good = np.ones(len(batch.rows), bool)
    good[list(faults.reasons)] = False
    table = pa.RecordBatch.from_arrays(arrays, schema=columns.row_schema)
    chosen = pa.array(good)
    return CheckedBatch(
        table=table.filter(chosen),
        good=good,
        groups=None if groups is None else groups.filter(chosen),
        rejected=_rejected(batch, faults, columns.text),
        splits=splits[good],
    )


def _values(batch: RawBatch, columns: Columns, faults: Faults) -> list[Any]:
    """Return the columns of `columns.row_schema` as arrays, except `source_row`."""
    text, label = columns.text, columns.label
    if columns.form == "words":
        return [*read_tagged(batch, text, str(label), faults)]
    if columns.form == "messages":
        return [*read_messages(batch, text, faults)]
    if columns.form == "pairs":
        others = str(columns.positive), columns.negative
        arrays = [*read_pairs(batch, text, *others, faults)]
    else:
        names = filter(None, (text, columns.text_pair, columns.completion))
        arrays = [read_text(batch, name, faults) for name in names]
    if label and (lowest := LOWEST_SCORE.get(columns.form)) is not None:
        arrays.append(read_score(batch, label, lowest, faults))
    elif label:
        arrays.append(read_label(batch, label, columns.label_type, faults))
    if columns.flags:
        arrays.append(read_flags(batch, columns.flags, faults))
    return arrays


def _rejected(batch: RawBatch, faults: Faults, text_column: str) -> Any:
    found = []
    for index, (column, reason) in sorted(faults.reasons.items()):
        # Show the wrong value, or the row's text if that value is empty.
        values = [excerpt(batch.columns[name][index]) for name in (column, text_column)]
        shown = values[0] if values[0].strip() not in NOTHING else values[1]
        found.append((batch.source, int(batch.rows[index]), reason, shown))
    found += [(batch.source, b.row, b.reason, b.excerpt) for b in batch.broken]
    # The sort is stable, so that parts of a row keep their order.
    return rejected_batch(sorted(found, key=itemgetter(1)))


def rejected_batch(found: Sequence[tuple[str, int, str, str]]) -> Any:
    """Return tuples (source, row, reason, excerpt) as a batch of REJECTED_SCHEMA."""
    names = REJECTED_SCHEMA.names
    rows = [dict(zip(names, one, strict=True)) for one in found]
    return pa.RecordBatch.from_pylist(rows, REJECTED_SCHEMA)
