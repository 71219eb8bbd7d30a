"""Concatenated rows of token ids, and their conversion to Arrow. Texts may be joined
into blocks of equal length, and a sample may consist of several texts."""

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
    """Raised if rows cannot be encoded. The message lists them and suggests a fix."""


@dataclass(frozen=True)
class Encoded:
    """N encoded rows with T tokens in total."""

    ids: Ids
    """Token ids of all rows (T,)."""
    lengths: Ids
    """Number of tokens in each row (N,)."""
    cut: Mask
    """Mask of the rows that were truncated to `max_length` (N,)."""
    type_ids: npt.NDArray[np.int8] | None = None
    """Token type ids (T,), only for pairs of texts."""
    marks: Ids | None = None
    """Mark of each token (T,). For rows of words, the first token of a word is marked
    with the index of the word. For completions and messages, target tokens are marked
    with 0. All other tokens are marked with -1."""


def flat(rows: Sequence[list[int]], typecode: str = "i") -> Any:
    """Return the concatenated lists as a NumPy array of int32 (or int8 if `typecode` is
    `b`). The tokenizers library only returns lists, and this is the fastest conversion:
    it takes 4 % of the encoding time."""
    joined = array(typecode)
    for row in rows:
        joined.fromlist(row)
    return np.frombuffer(joined, {"i": np.int32, "b": np.int8}[typecode])


LISTS = pa.list_(pa.int32())
JOINED_SCHEMA = pa.schema(
    {"input_ids": LISTS, "document_lengths": LISTS, "length": pa.int32()}
)
"""Schema of texts joined into blocks. `document_lengths` are the token counts of the
documents in a block, and `length` is their sum. Attention and labels must not cross
document boundaries."""


def join_blocks(encoded: Iterable[Encoded], block_size: int) -> Iterator[Any]:
    """Concatenate the rows of `encoded`, and yield them as RecordBatches of blocks with
    `block_size` tokens. The last block may be shorter.

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
    """Split the documents before token `at`. Return the lengths of the documents before
    and after the split. A document that spans the split is cut in two."""
    ends = np.cumsum(lengths, dtype=np.int64)
    last = int(np.searchsorted(ends, at, side="left"))
    head, tail = lengths[: last + 1].copy(), lengths[last:].copy()
    tail[0] = ends[last] - at
    head[-1] -= tail[0]
    return head, tail[tail > 0]


def _blocks(ids: Ids, lengths: Ids, block_size: int) -> Any:
    """Return `ids` (T,), divided into blocks, as a RecordBatch of JOINED_SCHEMA.
    `lengths` are the token counts of the documents."""
    document_ends = np.cumsum(lengths, dtype=np.int64)
    block_ends = np.append(np.arange(block_size, len(ids), block_size), len(ids))
    cuts = np.union1d(document_ends, block_ends)
    parts = np.diff(cuts, prepend=0).astype(np.int32)
    last_parts = np.searchsorted(cuts, block_ends, side="right")
    sizes = np.diff(block_ends, prepend=0).astype(np.int32)
    documents = lists_of(parts, np.diff(last_parts, prepend=0))
    columns = [lists_of(ids, sizes), documents, pa.array(sizes)]
    return pa.RecordBatch.from_arrays(columns, schema=JOINED_SCHEMA)


def lists_of(values: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Any:
    """Return `values` (T,) as an Arrow array of N lists with the given `lengths` (N,).
    The values are not copied."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


PASSAGES = "passages"
"""Name of the column with the positive text of a row, followed by the negatives."""
PAIRS_SCHEMA = pa.schema({"input_ids": LISTS, SEQUENCES: LISTS, "length": pa.int32()})
"""Schema of samples with several texts. `input_ids` are the concatenated tokens of all
texts, and `length` is the number of these tokens."""


def texts_of(table: Any) -> Any:
    """Return all texts of N samples as one Arrow array (S,), in which the passages of a
    sample follow its anchor."""
    anchors = table.column("text").to_pylist()
    passages = table.column(PASSAGES).to_pylist()
    pairs = zip(anchors, passages, strict=True)
    texts = [text for anchor, own in pairs for text in (anchor, *own)]
    return pa.array(texts, pa.string())


def counts_of(table: Any) -> npt.NDArray[np.int32]:
    """Return the number of texts in each sample (N,)."""
    passages = pc.list_value_length(table.column(PASSAGES)).to_numpy()
    return 1 + passages.astype(np.int32)


SCORED_SCHEMA = PAIRS_SCHEMA.append(pa.field("labels", pa.float64()))
"""Schema of pairs that have a score."""


def pair_batch(part: Encoded, counts: npt.NDArray[np.int32], scores: Any | None) -> Any:
    """Return a RecordBatch of N samples. `part` contains the sequences of all samples,
    and `counts` (N,) the number of sequences in each sample. The schema is
    PAIRS_SCHEMA, or SCORED_SCHEMA if `scores` (N,) are given."""
    sequences = lists_of(part.lengths, counts)
    firsts = sequences.offsets.to_numpy()[:-1]
    sizes = np.add.reduceat(part.lengths, firsts, dtype=np.int32)
    columns = [lists_of(part.ids, sizes), sequences, pa.array(sizes)]
    if scores is None:
        return pa.RecordBatch.from_arrays(columns, schema=PAIRS_SCHEMA)
    return pa.RecordBatch.from_arrays([*columns, scores], schema=SCORED_SCHEMA)


def num_cut(part: Encoded, counts: npt.NDArray[np.int32]) -> int:
    """Return the number of samples that contain a truncated text. `counts` (N,) are the
    numbers of texts in the samples."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return len(np.unique(rows[part.cut]))
