"""Concatenated rows of token ids, and their Arrow tables: texts joined to blocks of one
length, and samples of several texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.rows.token_facts import SEQUENCES

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class TokensError(ValueError):
    """Rows that cannot become token rows; the message names them and the remedy."""


@dataclass(frozen=True)
class Encoded:
    """N rows, T tokens in total."""

    ids: Ids
    """(T,) token ids."""
    lengths: Ids
    """(N,) tokens per row."""
    cut: Mask
    """(N,) true if the text was longer than `max_length`."""
    type_ids: npt.NDArray[np.int8] | None = None
    """(T,) for pairs of texts."""
    marks: Ids | None = None
    """(T,) for rows of words: the word's number at its first piece, -1 elsewhere.
    For completions: 0 at tokens to learn, -1 elsewhere."""


def flat(rows: Sequence[list[int]], typecode: str = "i") -> Any:
    """Concatenate lists. (The library returns ids only as lists; this is the fastest
    conversion, 4 % of the time of encoding.)"""
    joined = array(typecode)
    for row in rows:
        joined.fromlist(row)
    return np.frombuffer(joined, {"i": np.int32, "b": np.int8}[typecode])


JOINED_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("document_lengths", pa.list_(pa.int32())),
        ("length", pa.int32()),
    ]
)
"""`document_lengths`: tokens of each document's part of the block; their sum is
`length`. Attention and labels must not cross from one part to the next."""


def join_blocks(encoded: Iterable[Encoded], block_size: int) -> Iterator[Any]:
    """Yield RecordBatches of `block_size` tokens per block; the last may be shorter.

    With blocks of 4, documents [1 2 3] and [4 5 6] give
    [1 2 3 4] with lengths [3 1] and [5 6] with lengths [2].
    """
    ids = np.empty(0, np.int32)
    lengths = np.empty(0, np.int32)
    for part in encoded:
        ids = np.concatenate([ids, part.ids])
        lengths = np.concatenate([lengths, part.lengths[part.lengths > 0]])
        whole = len(ids) // block_size * block_size
        if whole:
            taken, lengths = _cut_documents(lengths, whole)
            yield _blocks(ids[:whole], taken, block_size)
            ids = ids[whole:]
    if len(ids):
        yield _blocks(ids, lengths, block_size)


def _cut_documents(lengths: Ids, at: int) -> tuple[Ids, Ids]:
    """Document lengths before and after token `at`; one document may be cut in two."""
    ends = np.cumsum(lengths, dtype=np.int64)
    last = int(np.searchsorted(ends, at, side="left"))
    head, tail = lengths[: last + 1].copy(), lengths[last:].copy()
    tail[0] = ends[last] - at
    head[-1] -= tail[0]
    return head, tail[tail > 0]


def _blocks(ids: Ids, lengths: Ids, block_size: int) -> Any:
    """One RecordBatch over `ids` (T,) with documents of `lengths`, sum T."""
    document_ends = np.cumsum(lengths, dtype=np.int64)
    block_ends = np.append(np.arange(block_size, len(ids), block_size), len(ids))
    cuts = np.union1d(document_ends, block_ends)
    parts = np.diff(cuts, prepend=0).astype(np.int32)
    parts_per_block = np.searchsorted(cuts, block_ends, side="right")
    offsets = np.concatenate([[0], parts_per_block]).astype(np.int32)
    starts = np.concatenate([[0], block_ends]).astype(np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(pa.array(starts), pa.array(ids)),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(parts)),
            pa.array(np.diff(starts)),
        ],
        schema=JOINED_SCHEMA,
    )


PASSAGES = "passages"
"""Column of rows: the positive, followed by the negatives."""
PAIRS_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        (SEQUENCES, pa.list_(pa.int32())),
        ("length", pa.int32()),
    ]
)
"""`length` is the sum of the sequences' tokens, concatenated in `input_ids`."""


def texts_of(table: Any) -> Any:
    """The texts (S,) of N samples in order."""
    anchors = table.column("text").to_pylist()
    passages = table.column(PASSAGES).to_pylist()
    pairs = zip(anchors, passages, strict=True)
    texts = [text for anchor, own in pairs for text in (anchor, *own)]
    return pa.array(texts, pa.string())


def counts_of(table: Any) -> npt.NDArray[np.int32]:
    """The number of texts (N,) of each sample."""
    passages = pc.list_value_length(table.column(PASSAGES)).to_numpy()
    return 1 + passages.astype(np.int32)


SCORED_SCHEMA = PAIRS_SCHEMA.append(pa.field("labels", pa.float64()))
"""Pairs with a score each."""


def pair_batch(part: Encoded, counts: npt.NDArray[np.int32], scores: Any | None) -> Any:
    """RecordBatch of PAIRS_SCHEMA of N samples of `counts` (N,) sequences; of
    SCORED_SCHEMA with `scores` (N,)."""
    ends = np.append(0, np.cumsum(counts)).astype(np.int32)
    starts = np.append(0, np.cumsum(part.lengths)).astype(np.int32)[ends]
    columns = [
        pa.ListArray.from_arrays(pa.array(starts), pa.array(part.ids)),
        pa.ListArray.from_arrays(pa.array(ends), pa.array(part.lengths)),
        pa.array(np.diff(starts)),
    ]
    if scores is None:
        return pa.RecordBatch.from_arrays(columns, schema=PAIRS_SCHEMA)
    return pa.RecordBatch.from_arrays([*columns, scores], schema=SCORED_SCHEMA)


def num_cut(part: Encoded, counts: npt.NDArray[np.int32]) -> int:
    """Number of samples with a truncated text."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return len(np.unique(rows[part.cut]))
