"""Statistics of the lengths and the truncation of token rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.tokenizing.token_keys import facts_of

QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HISTOGRAM_BINS = 40
Ints = npt.NDArray[np.int64]


def token_report(tokens: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Return a report on token rows as a JSON-compatible dict. `tokens` has a
    `datasets.Dataset` for each split, including `train`. Fractions are in [0, 1]."""
    return {
        "max_length": max_length,
        "splits": {name: _split(rows) for name, rows in tokens.items()},
        "histogram": histogram(lengths_of(tokens["train"])),
    }


def _split(rows: Any) -> dict[str, Any]:
    cut, lengths = facts_of(rows).get("cut_rows"), lengths_of(rows)
    return {
        "rows": len(lengths),
        "tokens": int(lengths.sum()),
        "cut_rows": cut,
        "cut_share": None if cut is None else round(cut / len(lengths), 6),
        "length": length_summary(lengths),
    }


def lengths_of(tokens: Any) -> Ints:
    """Return the number of tokens (N,) in each row of a `datasets.Dataset`."""
    return tokens.data.table.column("length").to_numpy().astype(np.int64)


def length_summary(lengths: Ints) -> dict[str, float]:
    found = np.quantile(lengths, list(QUANTILES.values()))
    summary = {
        name: round(float(value), 1)
        for name, value in zip(QUANTILES, found, strict=True)
    }
    return {**summary, "mean": round(float(lengths.mean()), 2)}


def histogram(lengths: Ints) -> dict[str, list[float]]:
    """Return a histogram of row lengths, with `counts` and `edges` as in NumPy."""
    longest = int(lengths.max())
    width = max(1, -(-longest // HISTOGRAM_BINS))
    edges = np.arange(0, longest + width + 1, width)
    counts, _ = np.histogram(lengths, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
