"""Rows in Arrow's buffers: the common base of all kinds of rows."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.files.atomic_folder import note_facts, stored_facts
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.token_facts import TokenFacts

logger = logging.getLogger(__name__)


class TokenRowsError(ValueError):
    """Rows with a missing column, no rows, or no file."""


AnyRows = TypeVar("AnyRows", bound="ArrowRows")


class ArrowRows(ABC):
    """Rows of a table; a process that receives them opens the file again."""

    column: ClassVar[str]
    """Column that contains the samples."""
    facts_class: ClassVar[type[TokenFacts]] = TokenFacts

    def __init__(self, table: pa.Table, folder: Path | None = None) -> None:
        if self.column not in table.column_names:
            raise TokenRowsError(
                f"rows need a column {self.column}; found {table.column_names}"
            )
        if table.num_rows == 0:
            raise TokenRowsError("there are no rows: the split is empty. Add data")
        self._table = table
        self.column_names: list[str] = list(table.column_names)
        self.folder = folder

    @classmethod
    def open(cls: type[AnyRows], folder: Path) -> AnyRows:
        """Memory-map the Arrow files of a folder written by `save_to_disk`."""
        files = sorted(folder.glob("*.arrow"))
        if not files:
            raise TokenRowsError(
                f"no Arrow file in {folder}: run the pipeline that makes it first"
            )
        tables = [pa.ipc.open_stream(pa.memory_map(str(f))).read_all() for f in files]
        return cls(pa.concat_tables(tables), folder)

    @classmethod
    def from_dataset(cls: type[AnyRows], dataset: Any) -> AnyRows:
        """Use the rows of a `datasets.Dataset`, memory-mapped or not."""
        files = [Path(entry["filename"]) for entry in dataset.cache_files]
        if dataset._indices is not None:  # rows were selected or shuffled
            dataset, files = dataset.flatten_indices(), []
        table = dataset.data.table
        folder = files[0].parent if files else None
        return cls(table, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder is not None:
            return type(self).open, (self.folder,)
        return type(self), (self._table,)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def table(self) -> pa.Table:
        return self._table

    @property
    def has_labels(self) -> bool:
        return "labels" in self.column_names

    @property
    def has_token_labels(self) -> bool:
        return False

    @cached_property
    @abstractmethod
    def _chunks(self) -> list[Any]:
        """One chunk per record batch, with a length and `labels` (N, ...) or None."""

    @cached_property
    def _chunk_starts(self) -> Ints:
        """First row number of each chunk, and the number of rows: (chunks + 1,)."""
        sizes = [len(chunk) for chunk in self._chunks]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _locate(self, rows: Ints) -> tuple[Ints, Ints]:
        chunks = np.searchsorted(self._chunk_starts, rows, side="right") - 1
        return chunks, rows - self._chunk_starts[chunks]

    def place_of(self, row: int) -> tuple[int, ...]:
        return (row,)

    def labels_of(self, rows: Ints) -> npt.NDArray[Any]:
        """Targets (N, ...) of `rows` (N,), int64 or float64. Raises TokenRowsError."""
        if not self.has_labels:
            raise TokenRowsError("these rows have no column labels")
        return self._gather(rows, lambda chunk, at: chunk.labels[at])

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """Copy of all targets (rows,), or None: not for large splits."""
        if not self.has_labels:
            return None
        values: npt.NDArray[Any] = self._table.column("labels").to_numpy()
        return values

    def _gather(
        self, rows: Ints, pick: Callable[[Any, Ints], npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        """Values for `rows` (N,), from `pick`(chunk, positions (n,)) for each chunk."""
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

    @cached_property
    def facts(self) -> TokenFacts:
        """Statistics counted when the rows were written. If none are stored, all rows
        are read once, and the statistics are stored with them."""
        stored = {} if self.folder is None else stored_facts(self.folder)
        noted = self.facts_class.noted(stored, len(self))
        if noted is not None or self.folder is None:
            return noted or self.facts_class.of(self._table)
        logger.info(
            "%s: reading all rows, because no statistics are stored", self.folder
        )
        facts = self.facts_class.of(self._table)
        note_facts(self.folder, facts.as_dict())
        return facts
