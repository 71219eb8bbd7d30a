"""Read raw rows from any source as batches of Arrow columns with row numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import arrow_digest

SPLITS = ("train", "validation", "test")
SOURCE = "raw_texts"
"""Name of the source of rows that were not read from a file."""
SHOWN_CHARACTERS = 80
BATCH_ROWS = 20_000
BATCH_BYTES = 64 << 20


class RawTextsError(ValueError):
    """Raised if raw data cannot be read. The message suggests a fix."""


class Kind(IntEnum):
    """The kind of a value in a column of mixed Python types."""

    MISSING = 0
    TEXT = 1
    NUMBER = 2
    OTHER = 3
    BAD_UNICODE = 4


@dataclass(frozen=True)
class BrokenRow:
    """A row that could not be parsed into columns."""

    row: int
    reason: str
    excerpt: str
    lines: int = 1
    """Number of lines in the file that were read as this row."""


@dataclass(frozen=True)
class RawBatch:
    """Consecutive rows of one source. `rows` (N,) are row numbers counted from 0."""

    source: str
    rows: npt.NDArray[np.int64]
    columns: dict[str, Any]
    """Arrow arrays of N values each, by column name."""
    kinds: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """The `Kind` of each value (N,) in columns of mixed Python types, by column name.
    The values of these columns were converted to text."""
    broken: list[BrokenRow] = field(default_factory=list)
    """Rows that could not be parsed. They are reported with the batch that contains the
    next parsed row, or with an earlier batch."""
    split: int = -1
    """Index of the rows' split in SPLITS, or -1 if no split is given."""


RowNumber = tuple[str, int]
"""The source of a row, and the row's number in that source."""


def named_row(key: RowNumber) -> str:
    """Return a readable name for a row, such as `row reviews.csv:38`, or `row 5` if the
    row was not read from a file."""
    return f"row {place(*key)}"


def place(source: str, row: int) -> str:
    """Return the location of a row, such as `reviews.csv:38`, or only the row number if
    the row was not read from a file."""
    return str(row) if source == SOURCE else f"{source}:{row}"


class RawTexts(Protocol):
    """Interface of all raw text sources."""

    @property
    def column_names(self) -> list[str]: ...

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]: ...

    def digest(self, columns: Sequence[str]) -> str: ...


def numbered(source: str, batches: Iterable[Any]) -> Iterator[RawBatch]:
    """Yield a RawBatch for each Arrow record batch of the source `source`. Rows are
    numbered consecutively from 0."""
    start = 0
    for batch in batches:
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = np.arange(start, start + batch.num_rows)
        start += batch.num_rows
        yield RawBatch(source, rows, arrays)


def open_raw_texts(data: Any, name: str = SOURCE) -> RawTexts:
    """Return a reader for a `datasets.Dataset`, a `DatasetDict`, a pandas or polars
    DataFrame, or an Arrow table. Readers are returned unchanged. `name` is the name of
    the catalog entry. Raises RawTextsError if `data` has another type."""
    kind = type(data).__name__
    if hasattr(data, "batches") and hasattr(data, "digest"):
        return data
    if isinstance(data, pa.Table):
        return _ArrowTexts(data, name)
    if kind == "Dataset":
        return _dataset_texts(data, name)
    if kind == "DataFrame":
        polars = hasattr(data, "to_arrow")
        return _ArrowTexts(data.to_arrow(), name) if polars else _FrameTexts(data, name)
    if kind == "DatasetDict":
        return _splits_of(data, name)
    raise RawTextsError(
        f"{name} is a {kind}; it must be a datasets.Dataset, a DataFrame or "
        "a flatout.datasets.TextFiles (not streaming: rows are read more than once)"
    )


def _splits_of(splits: Any, name: str) -> RawTexts:
    """Return a reader for all splits of a `datasets.DatasetDict`. If there is only one
    split, the rows are treated as unsplit, because `load_dataset` calls the rows of a
    plain file "train". Raises RawTextsError if the names of the splits are unknown."""
    if len(splits) == 1:
        return _dataset_texts(next(iter(splits.values())), name)
    from flatout.engine.data.given_splits import SplitTexts, entry_of, named_splits

    named = named_splits(splits, name).items()
    return SplitTexts({key: _dataset_texts(rows, entry_of(key)) for key, rows in named})


def rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Return the batch size for `num_rows` rows with `num_bytes` bytes in total. A
    batch has at most BATCH_ROWS rows and about BATCH_BYTES bytes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


@dataclass(frozen=True)
class _ArrowTexts:
    table: Any
    source: str = SOURCE

    @property
    def column_names(self) -> list[str]:
        return list(self.table.column_names)

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        table = self.table.select(columns)
        size = rows_at_once(table.num_rows, table.nbytes)
        return numbered(self.source, table.to_batches(max_chunksize=size))

    def digest(self, columns: Sequence[str]) -> str:
        return arrow_digest(self.table.select(columns).to_batches())


def _dataset_texts(dataset: Any, name: str) -> RawTexts:
    """Return a reader for a `datasets.Dataset`. Its rows stay memory-mapped. Class
    numbers, including those in lists, are replaced by their names."""
    table = without_indices(dataset).data.table
    for place, (column, feature) in enumerate(dataset.features.items()):
        inner = getattr(feature, "feature", feature)  # the feature inside a list
        if type(inner).__name__ != "ClassLabel":
            continue
        found = table.column(column).combine_chunks()
        named = _named if inner is feature else _named_lists
        table = table.set_column(place, column, named(found, inner.names))
    return _ArrowTexts(table, name)


def _named(numbers: Any, names: list[str]) -> Any:
    """Convert an Arrow array of class numbers to class names. Negative numbers become
    null, because datasets on the Hub mark a missing label with -1."""
    numbers = numbers.cast(pa.int32())
    labelled = pc.if_else(pc.less(numbers, 0), pa.scalar(None, pa.int32()), numbers)
    return pa.DictionaryArray.from_arrays(labelled, names)


def _named_lists(lists: Any, names: list[str]) -> Any:
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    values = _named(pc.list_flatten(lists), names).dictionary_decode()
    return pa.ListArray.from_arrays(offsets, values, mask=lists.is_null())


@dataclass(frozen=True)
class _FrameTexts:
    """Reader of a pandas DataFrame. In columns of mixed types, values that are not
    strings are converted to strings."""

    frame: Any
    source: str = SOURCE

    @property
    def column_names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        # Columns are looked up by position because their names may be numbers.
        places = {name: place for place, name in enumerate(self.column_names)}
        for start in range(0, len(self.frame), BATCH_ROWS):
            part = self.frame.iloc[start : start + BATCH_ROWS]
            kinds: dict[str, npt.NDArray[np.uint8]] = {}
            arrays = {
                name: _arrow_column(part.iloc[:, places[name]], kinds)
                for name in columns
            }
            rows = np.arange(start, start + len(part))
            yield RawBatch(self.source, rows, arrays, kinds)

    def digest(self, columns: Sequence[str]) -> str:
        tables = (pa.table(batch.columns) for batch in self.batches(columns))
        return arrow_digest(tables)


def _arrow_column(series: Any, kinds: dict[str, npt.NDArray[np.uint8]]) -> Any:
    try:
        array = pa.Array.from_pandas(series)
        if "extension" in str(array.type):  # intervals, for example from pandas.cut
            array = pa.Array.from_pandas(series.astype(object).map(str, "ignore"))
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        array, kinds[str(series.name)] = column_of_mixed(series.tolist())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def column_of_mixed(values: list[Any]) -> tuple[Any, npt.NDArray[np.uint8]]:
    """Return Python values as an Arrow array of strings, and the `Kind` of each."""
    kinds = np.fromiter(map(kind_of, values), np.uint8, len(values))
    pairs = zip(values, kinds.tolist(), strict=True)
    texts = [_text_of(value, kind) for value, kind in pairs]
    return pa.array(texts, pa.string()), kinds


def _text_of(value: Any, kind: int) -> str | None:
    """Return a value as text. A list becomes JSON, because it may be a list of labels.
    A value of an unusable kind is shortened, because it is only shown in messages."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return json.dumps(list(value), default=str)
    if kind == Kind.MISSING:
        return None
    if kind in (Kind.TEXT, Kind.NUMBER):
        return name_of(value)
    return str(value)[:SHOWN_CHARACTERS].encode(errors="replace").decode()


def name_of(value: Any) -> str:
    """Return a value as text, for example `1` for 1.0 and `true` for True. The spelling
    does not depend on whether a batch was read as integers, floats or Python values."""
    if isinstance(value, bool):
        return str(value).lower()
    is_float = isinstance(value, (float, np.floating))
    if is_float and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    return str(value)


def kind_of(value: Any) -> Kind:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return Kind.BAD_UNICODE
        return Kind.TEXT
    if isinstance(value, (int, float, np.integer, np.floating)):
        return Kind.MISSING if math.isnan(value) else Kind.NUMBER
    is_missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return Kind.MISSING if is_missing else Kind.OTHER
