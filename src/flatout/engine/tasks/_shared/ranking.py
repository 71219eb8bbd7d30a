"""Figures of rankings: the ranks of each query's passages by their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engine.tasks._task import Metrics

DEPTH = 10
RELEVANT = 0.5
"""Label from which a passage is relevant."""


class Ranking(Metrics):
    """Scores and labels of all rows."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, 1) and labels (k, 2): score and number of the query."""
        self._rows.append(torch.cat([logits.float(), labels.float()], 1))

    def kept(self) -> list[list[Tensor]]:
        """Return logits and labels (k, 3)."""
        return [self._rows]

    def compute(self) -> dict[str, Any]:
        """Return means over the queries with a relevant passage; empty without one."""
        rows = torch.cat(self._rows).cpu().numpy()
        return ranking_figures(*rows[~np.isnan(rows[:, 1])].T)


def ranking_figures(
    logits: npt.NDArray[Any], labels: npt.NDArray[Any], queries: npt.NDArray[Any]
) -> dict[str, float]:
    """Return the figures of N rows. Of equal logits the lowest label is first, so that
    a model that gives all passages one score has no advantage."""
    numbers, queries = np.unique(queries, return_inverse=True)
    order = np.lexsort((labels, -logits, queries))
    ideal = labels[np.lexsort((-labels, queries))].astype(np.float64)
    labels, queries = labels[order].astype(np.float64), queries[order]
    starts = np.searchsorted(queries, np.arange(len(numbers)))
    ranks = np.arange(len(queries)) - starts[queries] + 1
    relevant = labels >= RELEVANT
    seen = np.cumsum(relevant)
    hits: npt.NDArray[np.int64] = seen - (seen - relevant)[starts][queries]

    def sums(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        found = np.bincount(queries, values, len(numbers)).astype(np.float64)
        result: npt.NDArray[np.float64] = found[known]
        return result

    known = np.bincount(queries, relevant, len(numbers)) > 0
    if not known.any():
        return {}
    discounts = np.where(ranks <= DEPTH, 1 / np.log2(ranks + 1), 0)
    first = relevant & (hits == 1) & (ranks <= DEPTH)
    found = {
        "mrr_at_10": sums(first / ranks),
        "ndcg_at_10": sums(labels * discounts) / sums(ideal * discounts),
        "average_precision": sums(relevant * hits / ranks) / sums(relevant),
    }
    return {name: float(values.mean()) for name, values in found.items()}
