"""Read token rows from Arrow buffers, without copies or Python lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flatout.engine.rows.layout import Ints, LaidOut, Layout
from flatout.engine.rows.rows import Rows, SplitRows, TokenRowsError, values_in
from flatout.engine.rows.token_facts import SEQUENCES

Values = npt.NDArray[np.integer[Any]]

DOCUMENTS = "document_lengths"
"""Column with the token count of each document in a row of concatenated texts."""
LISTS = ("input_ids", "token_type_ids", DOCUMENTS, SEQUENCES)
MODEL_COLUMNS = ("token_type_ids",)
"""Columns with one value per token that the model receives along with the token ids."""


@dataclass(frozen=True)
class _Chunk:
    """A record batch. Each column is a pair (offsets, values), and row i of the column
    is `values[offsets[i]:offsets[i + 1]]`."""

    columns: dict[str, tuple[Values, Values]]
    labels: npt.NDArray[Any] | None

    @property
    def offsets(self) -> Values:
        return self.columns["input_ids"][0]

    def __len__(self) -> int:
        return len(self.offsets) - 1


class _Tokens(Rows):
    column_names: list[str]

    def lay_out(
        self, rows: Ints, layout: Layout, input_ids: Sequence[Any] | None = None
    ) -> LaidOut:
        names = [name for name in MODEL_COLUMNS if name in self.column_names]
        further = {name: self.views(rows, name) for name in names}
        return layout.lay_out(
            self.views(rows) if input_ids is None else input_ids, further
        )


class TokenRows(_Tokens, SplitRows):
    """Rows with `input_ids` (lists of integers) and optional labels per row or
    token."""

    kind = "tokens"
    column = "input_ids"

    @property
    def has_token_labels(self) -> bool:
        kind = self.table.schema.field("labels").type if self.has_labels else None
        return kind is not None and pa.types.is_list(kind)

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        names = [name for name in LISTS if name in self.column_names]
        names += ["labels"] if self.has_token_labels else []
        one_a_row = self.has_labels and not self.has_token_labels
        return [
            _Chunk(
                {name: _offsets_and_values(batch.column(name)) for name in names},
                values_in(batch.column("labels")) if one_a_row else None,
            )
            for batch in self.table.to_batches()
        ]

    def lengths(self, rows: Ints) -> Ints:
        return self._gather(rows, lambda chunk, at: _lengths(chunk.offsets, at))

    def readable(self, row: int, decode: Callable[[Ints], str]) -> str:
        return decode(np.asarray(self.views(np.array([row]))[0]))

    def views(self, rows: Ints, column: str = "input_ids") -> Sequence[Values]:
        """Return a 1-D view into the buffers of `column` for each of `rows` (N,)."""
        if len(self._chunks) == 1:
            offsets, values = self._chunks[0].columns[column]
            begins, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
            pairs = zip(begins, ends, strict=True)
            return [values[begin:end] for begin, end in pairs]
        chunks, local = self._locate(rows)
        views = []
        for chunk_index, row in zip(chunks.tolist(), local.tolist(), strict=True):
            offsets, values = self._chunks[chunk_index].columns[column]
            views.append(values[offsets[row] : offsets[row + 1]])
        return views

    def sequences(self, rows: Ints) -> tuple[Rows, Ints]:
        """Return the documents of concatenated texts or the sequences of samples, if
        rows consist of these, else `rows` (N,) unchanged."""
        if SEQUENCES in self.column_names:
            members = Members(self, rows, SEQUENCES)
            return members, np.arange(len(members))
        if DOCUMENTS not in self.column_names:
            return self, rows
        documents = Documents(self, rows)
        return documents, np.arange(len(documents))


def _lengths(offsets: Values, rows: Ints) -> Ints:
    return (offsets[rows + 1] - offsets[rows]).astype(np.int64)


class Documents(_Tokens):
    """The documents in some rows of concatenated texts, as separate rows. A document
    that continues in the next row counts as two documents."""

    def __init__(self, rows: TokenRows, row_ids: Ints, column: str = DOCUMENTS) -> None:
        """`column` contains the number of tokens of each part of a row."""
        parts = rows.views(row_ids, column)
        counts, row_lengths = [len(part) for part in parts], rows.lengths(row_ids)
        row_starts = np.cumsum(row_lengths) - row_lengths
        self._source, self.column_names = rows, rows.column_names
        self._lengths = np.concatenate(parts).astype(np.int64)
        self._rows = np.repeat(row_ids, counts)
        ends = np.cumsum(self._lengths)
        self._starts = ends - self._lengths - np.repeat(row_starts, counts)
        firsts = np.cumsum(counts) - counts
        self._places = np.arange(len(self._rows)) - np.repeat(firsts, counts)
        """The index of each part within its row, of shape (S,)."""

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, documents: Ints) -> Ints:
        return self._lengths[documents]

    def views(self, documents: Ints, column: str = "input_ids") -> Sequence[Values]:
        rows = self._source.views(self._rows[documents], column)
        starts, lengths = self._starts[documents], self._lengths[documents]
        places = zip(rows, starts.tolist(), lengths.tolist(), strict=True)
        return [row[start : start + length] for row, start, length in places]

    def labels_of(self, documents: Ints) -> npt.NDArray[Any]:
        raise TokenRowsError("joined texts have no labels")

    def place_of(self, document: int) -> tuple[int, ...]:
        """Return the number of the row that contains the document, and the index of the
        document's first token in this row."""
        return int(self._rows[document]), int(self._starts[document])


class Members(Documents):
    """The sequences of some samples, as separate rows. A sample consists of an anchor
    and the sequences with which it is compared."""

    def labels_of(self, members: Ints) -> npt.NDArray[Any]:
        """Return three values for each of `members` (N,), as an array (N, 3).

        The first value is the number of the sample. The second is the index of the
        sequence in the sample: 0 for the anchor, 1 for the positive, then negatives.
        The third is a hash of the tokens, by which duplicates are identified. For
        scored pairs, the index is 0 or -1, and the third value is the bit pattern of
        the score in fp32.
        """
        return self._labels[members]

    @cached_property
    def _labels(self) -> Ints:
        if self._source.has_labels:
            scores = self._source.labels_of(self._rows).astype(np.float32)
            return np.stack([self._rows, -self._places, scores.view(np.int32)], 1)
        views = self.views(np.arange(len(self)))
        hashes = [xxhash.xxh3_64_intdigest(view.tobytes()) >> 1 for view in views]
        return np.stack([self._rows, self._places, np.array(hashes, np.int64)], 1)


def _offsets_and_values(array: Any) -> tuple[Values, Values]:
    # For a slice, `.values` is the whole array, and the offsets refer to that array.
    return array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=True)
