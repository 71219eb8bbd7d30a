"""Token rows read from Arrow's own buffers, without a copy and without Python lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.batching import Ints


class TokenRowsError(ValueError):
    """Token rows that are not what the engine reads."""


@dataclass(frozen=True)
class _Chunk:
    """One record batch: `values[offsets[i]:offsets[i + 1]]` is row i."""

    offsets: npt.NDArray[np.integer[Any]]
    columns: dict[str, npt.NDArray[np.integer[Any]]]


class TokenRows:
    """Rows with `input_ids` (list of int) and, where there is one target a row,
    `labels`. Opened again, not copied, when sent to another process."""

    def __init__(self, table: pa.Table, folder: Path | None = None) -> None:
        if "input_ids" not in table.column_names:
            raise TokenRowsError(
                f"token rows need a column input_ids; found {table.column_names}"
            )
        if table.num_rows == 0:
            raise TokenRowsError("there are no token rows: the split is empty")
        self._table = table
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> TokenRows:
        """Memory-map the Arrow files of a folder written by `save_to_disk`."""
        files = sorted(folder.glob("*.arrow"))
        if not files:
            raise TokenRowsError(
                f"no Arrow file in {folder}: run the tokenize pipeline first"
            )
        tables = [pa.ipc.open_stream(pa.memory_map(str(f))).read_all() for f in files]
        return cls(pa.concat_tables(tables), folder)

    @classmethod
    def from_dataset(cls, dataset: Any) -> TokenRows:
        """From a `datasets.Dataset`, memory-mapped or not."""
        files = [Path(entry["filename"]) for entry in dataset.cache_files]
        if dataset._indices is not None:  # rows were selected or shuffled
            dataset, files = dataset.flatten_indices(), []
        table = dataset.data.table
        folder = files[0].parent if files else None
        return cls(table, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder is not None:
            return TokenRows.open, (self.folder,)
        return TokenRows, (self._table,)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def table(self) -> pa.Table:
        """All rows, as Arrow holds them."""
        return self._table

    @property
    def column_names(self) -> list[str]:
        return list(self._table.column_names)

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        names = [n for n in ("input_ids", "token_type_ids") if n in self.column_names]
        lists = {name: self._table.column(name).chunks for name in names}
        return [
            _Chunk(
                _list_offsets(lists["input_ids"][index]),
                {name: _list_values(lists[name][index]) for name in names},
            )
            for index in range(len(lists["input_ids"]))
        ]

    @cached_property
    def _chunk_starts(self) -> Ints:
        """First row number of each chunk, and the number of rows: (chunks + 1,)."""
        sizes = [len(chunk.offsets) - 1 for chunk in self._chunks]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _locate(self, rows: Ints) -> tuple[Ints, Ints]:
        chunks = np.searchsorted(self._chunk_starts, rows, side="right") - 1
        return chunks, rows - self._chunk_starts[chunks]

    def lengths(self, rows: Ints) -> Ints:
        """Tokens (N,) of each of `rows` (N,)."""
        chunks, local = self._locate(rows)
        result = np.empty(len(rows), dtype=np.int64)
        for index in np.unique(chunks):
            chosen = chunks == index
            offsets, where = self._chunks[index].offsets, local[chosen]
            result[chosen] = offsets[where + 1] - offsets[where]
        return result

    @cached_property
    def all_lengths(self) -> Ints:
        """Tokens (rows,) of every row."""
        return np.concatenate([np.diff(chunk.offsets) for chunk in self._chunks])

    def views(
        self, rows: Ints, column: str = "input_ids"
    ) -> Sequence[npt.NDArray[np.integer[Any]]]:
        """Views into the buffers, one (length,) for each of `rows` (N,)."""
        chunks, local = self._locate(rows)
        views = []
        for chunk_index, row in zip(chunks.tolist(), local.tolist(), strict=True):
            chunk = self._chunks[chunk_index]
            start, stop = chunk.offsets[row], chunk.offsets[row + 1]
            views.append(chunk.columns[column][start:stop])
        return views

    @cached_property
    def labels(self) -> npt.NDArray[Any] | None:
        """Targets (rows,) int64 or float64; None for language models."""
        if "labels" not in self.column_names:
            return None
        values: npt.NDArray[Any] = self._table.column("labels").to_numpy()
        return values

    def largest_token_id(self) -> int:
        return max(int(c.columns["input_ids"].max(initial=0)) for c in self._chunks)


def _list_offsets(array: Any) -> npt.NDArray[np.integer[Any]]:
    offsets: npt.NDArray[np.integer[Any]] = array.offsets.to_numpy()
    return offsets


def _list_values(array: Any) -> npt.NDArray[np.integer[Any]]:
    # .values ignores the slice's offset, as the offsets do: the two fit together.
    values: npt.NDArray[np.integer[Any]] = array.values.to_numpy(zero_copy_only=True)
    return values
