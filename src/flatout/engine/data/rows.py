"""Checked rows: which raw rows can be used, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    Mask,
    read_class,
    read_group,
    read_number,
    read_text,
)
from flatout.engine.data.column_names import column_faults, listed
from flatout.engine.data.raw_texts import Kind, RawBatch, RawTexts, RawTextsError
from flatout.engine.settings import CLASSIFIES, SplitSettings, Task

EXCERPT_CHARACTERS = 80
NOTHING = ("", "None")
"""Excerpts that show nothing."""

REJECTED_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
        ("reason", pa.string()),
        ("excerpt", pa.string()),
    ]
)


@dataclass(frozen=True)
class Columns:
    """Which raw column is what. None: the rows have no such column."""

    text: str
    text_pair: str | None
    label: str | None
    group: str | None
    regression: bool = False

    @classmethod
    def of(cls, settings: SplitSettings, task: Task) -> Columns:
        """Raises RawTextsError where the task needs labels and no column is named."""
        if task in CLASSIFIES and settings.label_column is None:
            raise RawTextsError(
                f"model.task is {task}, which needs labels: set split.label_column "
                "(or model.task: causal-lm / masked-lm for unlabelled text)"
            )
        return cls(
            text=settings.text_column,
            text_pair=settings.text_pair_column,
            label=settings.label_column if task in CLASSIFIES else None,
            group=settings.group_column,
            regression=task == "regression",
        )

    @property
    def names(self) -> list[str]:
        wanted = (self.text, self.text_pair, self.label, self.group)
        return list(dict.fromkeys(name for name in wanted if name is not None))

    @property
    def row_schema(self) -> pa.Schema:
        """Columns of the checked rows, whatever the raw columns are called."""
        label = pa.float64() if self.regression else pa.string()
        fields = [("text", pa.string())]
        fields += [("text_pair", pa.string())] if self.text_pair else []
        fields += [("label", label)] if self.label else []
        return pa.schema([*fields, ("source_row", pa.int64())])

    def check_present(self, raw: RawTexts) -> None:
        """Raises RawTextsError that names what is missing and what there is."""
        wanted = {
            "split.text_column": self.text,
            "split.text_pair_column": self.text_pair,
            "split.label_column": self.label,
            "split.group_column": self.group,
        }
        present = raw.column_names
        faults = column_faults(present, wanted, "raw_texts")
        if faults:
            raise RawTextsError(
                f"raw_texts has the columns {listed(present)}. {faults}"
            )


@dataclass(frozen=True)
class CheckedBatch:
    """Rows that can be used, canonical columns; and those that cannot."""

    table: Any
    """RecordBatch with `Columns.row_schema`, N rows."""
    good: Mask
    """(raw rows,) which raw rows of the batch are in `table`."""
    groups: Any | None
    label_kinds: npt.NDArray[np.uint8]
    """(N,) `Kind` of each label."""
    rejected: Any
    """RecordBatch with REJECTED_SCHEMA."""


def check_batch(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Judge each row of `batch`; the first reason that applies is the one given."""
    text, found = read_text(batch, columns.text)
    checks = _of(columns.text, found)
    arrays, label_kinds = [text], np.full(len(batch.rows), Kind.TEXT, np.uint8)
    if columns.text_pair:
        pair, found = read_text(batch, columns.text_pair)
        arrays, checks = [*arrays, pair], checks + _of(columns.text_pair, found)
    if columns.label:
        read = read_number if columns.regression else read_class
        label, label_kinds, found = read(batch, columns.label)
        arrays, checks = [*arrays, label], checks + _of(columns.label, found)
    groups = None
    if columns.group:
        groups, found = read_group(batch, columns.group)
        checks = checks + _of(columns.group, found)
    good = ~np.logical_or.reduce([mask for _, (mask, _) in checks])
    arrays.append(pa.array(batch.rows))
    table = pa.RecordBatch.from_arrays(arrays, schema=columns.row_schema)
    chosen = pa.array(good)
    return CheckedBatch(
        table=table.filter(chosen),
        good=good,
        groups=None if groups is None else groups.filter(chosen),
        label_kinds=label_kinds[good],
        rejected=_rejected(batch, checks, columns.text),
    )


def _of(column: str, checks: list[Check]) -> list[tuple[str, Check]]:
    return [(column, check) for check in checks]


def _rejected(
    batch: RawBatch, checks: list[tuple[str, Check]], text_column: str
) -> Any:
    """Rows of the quarantine file, in the order of the rows."""
    faults: dict[int, tuple[str, str]] = {}
    for column, (mask, reason) in reversed(checks):  # the first has the last word
        at = np.flatnonzero(mask).tolist()
        faults.update(dict.fromkeys(at, (column, reason)))
    found = []
    for index, (column, reason) in sorted(faults.items()):
        # What is wrong; the row's text where nothing is there to be shown.
        values = [excerpt(batch.columns[name][index]) for name in (column, text_column)]
        shown = values[0] if values[0].strip() not in NOTHING else values[1]
        found.append((int(batch.rows[index]), reason, shown))
    found += [(broken.row, broken.reason, broken.excerpt) for broken in batch.broken]
    return rejected_batch(batch.source, sorted(found))


def rejected_batch(source: str, found: list[tuple[int, str, str]]) -> Any:
    """RecordBatch of REJECTED_SCHEMA from (row, reason, excerpt)."""
    rows, reasons, excerpts = zip(*found, strict=True) if found else ([], [], [])
    columns = [[source] * len(found), list(rows), list(reasons), list(excerpts)]
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(columns, REJECTED_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=REJECTED_SCHEMA)


def excerpt(value: Any) -> str:
    """The first characters of a value, printable."""
    try:
        text = str(value.as_py())
    except UnicodeDecodeError:
        text = repr(value.cast(pa.binary()).as_py())
    cut = text[:EXCERPT_CHARACTERS]
    return cut.encode("utf-8", "replace").decode().replace("\x00", "\\0")
