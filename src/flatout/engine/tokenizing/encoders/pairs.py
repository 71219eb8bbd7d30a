"""Samples of several texts: an anchor and its passages, each a separate sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.rows.token_facts import SEQUENCES
from flatout.engine.tokenizing.encoders.encoded import Encoded

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
    counts: npt.NDArray[np.int32] = 1 + passages.astype(np.int32)
    return counts


def passage_bytes(table: Any) -> npt.NDArray[np.int64]:
    """Bytes (N,) of each sample's passages."""
    lists = table.column(PASSAGES)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy())
    sizes = pc.binary_length(pc.list_flatten(lists)).to_numpy().astype(np.int64)
    sums = np.append(0, np.cumsum(sizes))
    found: npt.NDArray[np.int64] = np.diff(sums[np.append(0, ends)])
    return found


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
