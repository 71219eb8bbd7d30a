"""Pairs and triplets: an anchor, the text that belongs to it, and texts that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    checks_of,
    parsed_list,
    python_values,
    read_text,
)
from flatout.engine.data.raw_texts import RawBatch

Checks = list[tuple[str, Check]]


def read_pairs(
    batch: RawBatch, anchor: str, positive: str, negative: str | None
) -> tuple[Any, Any, Checks]:
    """Return anchors (N,), lists (N,) of the positive followed by the negatives, and
    errors by column."""
    anchors, first = read_text(batch, anchor)
    positives, second = read_text(batch, positive)
    checks = [(anchor, check) for check in first]
    checks += [(positive, check) for check in second]
    if negative is None:
        offsets = np.arange(len(positives) + 1, dtype=np.int32)
        return anchors, pa.ListArray.from_arrays(offsets, positives), checks
    values = python_values(batch, negative)
    pairs = list(zip(positives.to_pylist(), values, strict=True))
    found = [_negatives(negative, value, own) for own, value in pairs]
    checks += [(negative, check) for check in checks_of(found)]
    lists = [
        [own, *others] if isinstance(others, list) else None
        for (own, _), others in zip(pairs, found, strict=True)
    ]
    return anchors, pa.array(lists, pa.list_(pa.string())), checks


def _negatives(name: str, value: Any, positive: str | None) -> list[str] | str:
    """Return the texts, or the error."""
    if value is None:
        return f"{name} is missing"
    found = parsed_list(value)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(t, str) for t in found):
        return f"{name} is neither a text nor a list of texts"
    if not all(text.strip() for text in found):
        return f"{name} is empty"
    if positive in found:
        return f"{name} equals the positive"
    return found
