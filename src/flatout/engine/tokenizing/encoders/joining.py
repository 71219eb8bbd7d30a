"""Texts concatenated to blocks of one length, with the documents' bounds kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tokenizing.encoders.encoded import Encoded

JOINED_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("document_lengths", pa.list_(pa.int32())),
        ("length", pa.int32()),
    ]
)
"""`document_lengths`: tokens of each document's part of the block; their sum is
`length`. Attention and labels must not cross from one part to the next."""

Ids = npt.NDArray[np.int32]


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
