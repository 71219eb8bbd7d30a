"""Read numeric tables from Parquet and CSV files in common export formats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.arrays.sources import ArraysError, as_numbers
from flatout.engine.data.column_checks import Faults, is_text, read_number, value_of
from flatout.engine.data.forms import with_digits
from flatout.engine.data.raw_texts import RawBatch
from flatout.engine.data.readers.file_reader import Format
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.files.content_key import plain_values
from flatout.engine.rows.rows import LISTS

ENDINGS = (".parquet", ".csv", ".tsv")
DELIMITERS = ",;\t|"
HEAD_BYTES = 64 << 10
NOT_UNICODE = "\udcff"
"""Placeholder for a label that is not valid UTF-8. Such labels are rejected later."""


def table(file: Path) -> TextFiles:
    """Return a reader for a table. A CSV file's delimiter is guessed from its header:
    the most frequent character among DELIMITERS."""
    with file.open("rb") as opened:
        head = opened.readline(HEAD_BYTES).decode(errors="replace")
    return TextFiles(file, Format(delimiter=max(DELIMITERS, key=head.count)))


def samples(file: Path, batch: RawBatch) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """Return samples (n, ...) from a column of lists, or from one column per number,
    and a mapping from the index of each unusable row to the reason. Raises ArraysError
    if the columns cannot be used."""
    first, *others = batch.columns.values()
    if not others and isinstance(first, LISTS):
        return _listed(first)
    faults: dict[int, str] = {}
    found = []
    for name in batch.columns:
        numbers, unusable = _numbers(file, batch, name)
        for row in np.flatnonzero(unusable).tolist():
            faults.setdefault(row, f"{name} is missing or not a number")
        found.append(numbers)
    values = np.stack(found, 1)
    return values.astype(np.promote_types(values.dtype, np.float32)), faults


def labels(batch: RawBatch, name: str) -> list[Any]:
    """Return the labels (n,) of a batch as Python objects."""
    return [value_of(label, NOT_UNICODE) for label in batch.columns[name]]


def _numbers(file: Path, batch: RawBatch, name: str) -> tuple[Any, Any]:
    """Return a column as numbers (n,), and a mask (n,) of missing or invalid values.
    Raises ArraysError if the column's type is not numeric, or if a text column has more
    invalid values than numbers in the first batch of a file."""
    column = batch.columns[name]
    if pa.types.is_null(column.type):
        column = column.cast(pa.float32())
    if is_text(column.type):
        numbers = read_number(batch, name, Faults()).to_numpy()
        if np.isnan(numbers).any():
            numbers = read_number(with_digits(batch, name), name, Faults()).to_numpy()
        unusable = np.isnan(numbers)
        given = pc.greater(pc.binary_length(plain_values(column)), 0).fill_null(False)
        wrong = unusable & given.to_numpy(zero_copy_only=False)
        if batch.rows[:1].any() or wrong.sum() <= (~unusable).sum():
            return numbers, unusable
    elif _is_number(column.type):
        blank = pa.scalar(0).cast(column.type)
        filled = column.fill_null(blank).to_numpy(zero_copy_only=False)
        return as_numbers(filled), column.is_null()
    raise ArraysError(
        f"{file}: column {name} is {column.type}, not a number: name the columns of "
        "the samples in arrays.inputs"
    )


def _listed(column: Any) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """Return samples (n, ...) from a column of n lists of any depth, and a mapping from
    the index of each unusable row to the reason. Rows whose shape is not the most
    common one are unusable."""
    rows = [_array(value) for value in column.to_pylist()]
    shapes = Counter(row.shape for row in rows if row is not None)
    shape = shapes.most_common(1)[0][0] if shapes else (0,)
    faults = {
        n: "missing, ragged or no numbers"
        if row is None
        else f"of shape {row.shape}, but others have shape {shape}"
        for n, row in enumerate(rows)
        if row is None or row.shape != shape
    }
    blank = np.zeros(shape, np.float32)
    kept = [blank if n in faults else row for n, row in enumerate(rows)]
    return np.stack(kept), faults  # type: ignore[arg-type]


def _array(value: Any) -> npt.NDArray[Any] | None:
    if value is None:
        return None
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):  # The list is ragged or contains text.
        return None
    return as_numbers(found)


def _is_number(kind: Any) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(test(kind) for test in tests)
