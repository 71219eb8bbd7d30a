"""Tables of numbers: Parquet, and CSV in usual export formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from flatout.engine.arrays.sources import WINDOW_ROWS, ArraysError, as_numbers

ENDINGS = (".parquet", ".csv", ".tsv")
DELIMITERS = ",;\t|"


def names(file: Path) -> list[str]:
    """Return the column names. Raises ArraysError."""
    with _readable(file):
        if file.suffix.lower() == ".parquet":
            found = pq.read_schema(file).names
        else:
            with csv.open_csv(file, parse_options=_parsing(file)) as opened:
                found = opened.schema.names
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise ArraysError(f"{file}: two columns are called {twice[0]}: rename one")
    return list(found)


def batches(
    file: Path, columns: Sequence[str], numbers: Sequence[str] = ()
) -> Iterator[Any]:
    """Yield these columns, WINDOW_ROWS at a time; a CSV is parsed as a whole, because
    the type of a column depends on all its values. Raises ArraysError, also if most
    values of a column of `numbers` are not numbers."""
    with _readable(file):
        if file.suffix.lower() == ".parquet":
            opened = pq.ParquetFile(file)
            yield from opened.iter_batches(WINDOW_ROWS, columns=columns)
            return
        table = csv.read_csv(file, parse_options=_parsing(file)).select(columns)
    for at, name in enumerate(columns):
        if name in numbers and pa.types.is_string(table.column(name).type):
            table = table.set_column(at, name, _read(file, name, table.column(name)))
    yield from table.combine_chunks().to_batches(WINDOW_ROWS)


def _read(file: Path, name: str, texts: Any) -> Any:
    """Return a column of texts in fp64, with null if a text is not a number: one such
    cell makes a column of a CSV text. Raises ArraysError if most are not numbers."""
    import pandas as pd

    values = pd.to_numeric(pd.Series(texts.to_pylist(), dtype=object), errors="coerce")
    if 2 * values.isna().sum() >= len(values):
        raise ArraysError(_no_number(file, name, texts.type))
    return pa.array(values.astype(float), pa.float64(), from_pandas=True)


def _parsing(file: Path) -> Any:
    """Use the delimiter that is most frequent in the header."""
    with file.open("rb") as opened:
        head = opened.readline().decode(errors="replace")
    return csv.ParseOptions(delimiter=max(DELIMITERS, key=head.count))


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise ArraysError(f"{file} cannot be read: {error}") from error


def samples(file: Path, batch: Any) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """Return (n, ...) from one column of lists, or one column per number; and errors by
    row. Raises ArraysError."""
    columns = batch.columns
    if len(columns) == 1 and _is_list(columns[0].type):
        return _listed(columns[0])
    faults: dict[int, str] = {}
    found = []
    for name, column in zip(batch.schema.names, columns, strict=True):
        if not _is_number(column.type):
            raise ArraysError(_no_number(file, name, column.type))
        for row in np.flatnonzero(column.is_null().to_numpy(False)).tolist():
            faults.setdefault(row, f"{name} is missing or no number")
        blank = pa.scalar(0).cast(column.type)
        found.append(as_numbers(column.fill_null(blank).to_numpy(False)))
    values = np.stack(found, 1)  # type: ignore[arg-type]
    return values.astype(np.promote_types(values.dtype, np.float32)), faults


def _no_number(file: Path, name: str, kind: Any) -> str:
    return (
        f"{file}: column {name} is {kind}, no number: name the columns of the samples "
        "in arrays.inputs"
    )


def _listed(column: Any) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """Lists of any depth; rows with another shape than most have an error."""
    rows = [_array(value) for value in column.to_pylist()]
    shapes = [None if row is None else row.shape for row in rows]
    known = Counter(found for found in shapes if found is not None)
    shape = known.most_common(1)[0][0] if known else (0,)
    faults = {
        row: f"of shape {found}, others are of {shape}"
        if found is not None
        else "missing, ragged or no numbers"
        for row, found in enumerate(shapes)
        if found != shape
    }
    blank = np.zeros(shape, np.float32)
    kept = [blank if n in faults else row for n, row in enumerate(rows)]
    return np.stack(kept), faults  # type: ignore[arg-type]


def _array(value: Any) -> npt.NDArray[Any] | None:
    if value is None:
        return None
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):  # ragged, or contains text
        return None
    return as_numbers(found)


def _is_list(kind: Any) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def _is_number(kind: Any) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(test(kind) for test in tests)
