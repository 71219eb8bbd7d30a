"""The rows of a split in Arrow buffers, and their interface for batching and training.

Each kind of rows (tokens, arrays, images) is a subclass of `SplitRows` in its own file.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.files.identity import digest_of, sources_of
from flatout.engine.files.keyed_folder import note_facts, stored_facts
from flatout.engine.rows.layout import Ints, LaidOut, Layout
from flatout.engine.rows.token_facts import TokenFacts

logger = logging.getLogger(__name__)

CODE = "code"
"""Name of the stored digest of a custom class's code."""
LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)


class TokenRowsError(ValueError):
    """Raised if there are no rows, or if a column is missing or has missing values."""


class Rows(ABC):
    """Base class of rows from which micro-batches can be built."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lengths(self, rows: Ints, /) -> Ints:
        """Return the number of tokens (N,) of each of the rows `rows` (N,). Samples of
        a fixed shape have length 1."""

    @abstractmethod
    def views(self, rows: Ints, column: str = ..., /) -> Sequence[npt.NDArray[Any]]:
        """Return a 1-D view of the values in `column` for each of `rows` (N,)."""

    @abstractmethod
    def labels_of(self, rows: Ints, /) -> npt.NDArray[Any]:
        """Return the targets (N, ...) of `rows` (N,), as int64 or float64. Raises
        TokenRowsError if the rows have no labels."""

    @property
    def has_token_labels(self) -> bool:
        """Whether each token has a label, which `views` returns as column `labels`."""
        return False

    def sequences(self, rows: Ints, /) -> tuple[Rows, Ints]:
        """Return the sequences that the rows `rows` (N,) consist of, as a `Rows` object
        and an array (S,) of row numbers in it. A sequence is a row or a part of a row.
        Attention and targets are limited to a sequence."""
        return self, rows

    def place_of(self, row: int, /) -> tuple[int, ...]:
        """Return a row's position in the split. It seeds the row's random choices."""
        return (row,)

    @abstractmethod
    def lay_out(
        self, rows: Ints, layout: Layout, values: Sequence[Any] | None = None, /
    ) -> LaidOut:
        """Return the arrays of a micro-batch with the rows `rows` (B,). If `values`
        (one array per row) is given, it replaces the values of the rows."""


class SplitRows(Rows):
    """Base class of the rows of a split. Unpickled rows open their files again."""

    known: ClassVar[list[type[SplitRows]]] = []
    """The subclasses, beginning with the latest."""
    kind: ClassVar[str]
    """The name of this kind of rows in catalog entries, such as `train_<kind>`."""
    column: ClassVar[str]
    """The column that contains the samples. No other kind has a column of this name."""
    one_shape: ClassVar[bool] = False
    """Whether all samples have the same shape, so that batches need no padding."""
    facts_class: ClassVar[type[TokenFacts]] = TokenFacts
    decodes: ClassVar[bool] = False
    """Whether rows must be decoded when a batch is built, which needs CPU time."""

    def __init_subclass__(cls) -> None:
        """Register the class. Raises TypeError if another has its kind or column."""
        for other in SplitRows.known:
            is_same = str(other) == str(cls)  # the module was imported again
            if not is_same and (cls.kind == other.kind or cls.column == other.column):
                raise TypeError(
                    f"{cls.__name__}: its kind {cls.kind!r} or its column "
                    f"{cls.column!r} is that of {other.__name__}: set both to others"
                )
        SplitRows.known.insert(0, cls)

    def __init__(self, table: pa.Table, folder: Path | None = None) -> None:
        """`folder` contains the files of the rows, or is None for rows in memory.
        Raises TokenRowsError if rows, columns or values are missing."""
        if self.column not in table.column_names:
            raise TokenRowsError(
                f"rows need a column {self.column}; found {table.column_names}"
            )
        if table.num_rows == 0:
            raise TokenRowsError("there are no rows: the split is empty. Add data")
        for name in (self.column, "labels"):
            found = table.column(name).chunks if name in table.column_names else []
            if any(map(_has_nulls, found)):
                raise TokenRowsError(
                    f"column {name} of these rows has missing values (null): "
                    "fill them in, or leave these rows out"
                )
        self.table = table
        self.column_names: list[str] = list(table.column_names)
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder is not None:
            return open_rows, (self.folder, type(self))
        return type(self), (self.table,)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def has_labels(self) -> bool:
        return "labels" in self.column_names

    @property
    def row_bytes(self) -> int:
        """The size of a sample in a batch in bytes, or 0 if samples differ in size."""
        return 0

    @cached_property
    def _is_custom(self) -> bool:
        return not type(self).__module__.startswith("flatout.")

    @cached_property
    @abstractmethod
    def _chunks(self) -> list[Any]:
        """One chunk per record batch, with a length and `labels` (N, ...) or None."""

    @cached_property
    def _chunk_starts(self) -> Ints:
        """The first row of each chunk, followed by the number of rows (chunks + 1,)."""
        sizes = [len(chunk) for chunk in self._chunks]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _locate(self, rows: Ints) -> tuple[Ints, Ints]:
        chunks = np.searchsorted(self._chunk_starts, rows, side="right") - 1
        return chunks, rows - self._chunk_starts[chunks]

    def labels_of(self, rows: Ints) -> npt.NDArray[Any]:
        if not self.has_labels:
            raise TokenRowsError("these rows have no column labels")
        return self._gather(rows, lambda chunk, at: chunk.labels[at])

    def _gather(
        self, rows: Ints, pick: Callable[[Any, Ints], npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        """Return a value for each of `rows` (N,). `pick` returns the values of a chunk
        at the given positions (n,)."""
        if len(self._chunks) == 1:
            return pick(self._chunks[0], rows)
        chunks, local = self._locate(rows)
        parts = [(c, chunks == c) for c in np.unique(chunks)]
        found = [pick(self._chunks[c], local[chosen]) for c, chosen in parts]
        like = found[0] if found else np.empty(0, np.int64)
        result = np.empty((len(rows), *like.shape[1:]), like.dtype)
        for (_, chosen), values in zip(parts, found, strict=True):
            result[chosen] = values
        return result

    @abstractmethod
    def readable(self, row: int, decode: Callable[[Ints], str], /) -> str:
        """Return a row's text, or the name of its file or row in the raw data."""

    @cached_property
    def facts(self) -> TokenFacts:
        """Statistics of the rows. They are usually stored with the rows. Otherwise, or
        if the code of a custom class has changed, all rows are read once to compute
        them, and the result is stored."""
        stored = {} if self.folder is None else stored_facts(self.folder)
        module = type(self).__module__
        code = {CODE: digest_of(sources_of(module))} if self._is_custom else {}
        is_current = code.items() <= stored.items()
        noted = self.facts_class.noted(stored, len(self)) if is_current else None
        if noted is not None or self.folder is None:
            return noted or self.facts_class.of(self.table)
        logger.info("%s: reading all rows to compute statistics", self.folder)
        facts = self.facts_class.of(self.table)
        note_facts(self.folder, facts.as_dict() | code)
        return facts


def open_rows(folder: Path, kind: type[SplitRows] | None = None) -> SplitRows:
    """Memory-map the Arrow files in `folder`, which `save_to_disk` has written. `kind`
    defaults to the class that the columns determine. Raises TokenRowsError if there are
    no files or the rows cannot be used."""
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise TokenRowsError(
            f"no Arrow file in {folder}: run the pipeline that makes it first"
        )
    tables = [pa.ipc.open_stream(pa.memory_map(str(f))).read_all() for f in files]
    return (kind or rows_of)(pa.concat_tables(tables), folder)


def rows_from_dataset(dataset: Any) -> SplitRows:
    """Return the rows of a `datasets.Dataset`, whether it is memory-mapped or not.
    Raises TokenRowsError if the rows cannot be used."""
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if dataset._indices is not None:  # rows were selected or shuffled
        dataset, files = dataset.flatten_indices(), []
    return rows_of(dataset.data.table, files[0].parent if files else None)


def rows_of(table: pa.Table, folder: Path | None = None) -> SplitRows:
    """Return the rows of `table`, whose columns determine their kind. Raises
    TokenRowsError if the rows cannot be used."""
    for kind in SplitRows.known:
        if kind.column in table.column_names:
            return kind(table, folder)
    columns = ", ".join(kind.column for kind in SplitRows.known)
    raise TokenRowsError(
        f"rows need one of the columns {columns}; found {table.column_names}"
    )


def _has_nulls(array: Any) -> bool:
    """Return whether `array`, or a list nested in it, has missing values."""
    inside = isinstance(array, LISTS) and _has_nulls(array.flatten())
    return inside or array.null_count > 0


def values_in(array: Any) -> npt.NDArray[Any]:
    """Return the values of an Arrow array as a NumPy array. Nested fixed-size lists
    have the shape (N, ...), and plain values have the shape (N,). Raises TokenRowsError
    if lists do not have a fixed size."""
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    if isinstance(array, LISTS):
        raise TokenRowsError(f"{array.type}: store lists of a fixed size (array_of)")
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def array_of(values: npt.NDArray[Any]) -> Any:
    """Return `values` (N, ...) as nested fixed-size Arrow lists, without a copy."""
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
