"""Ranking metrics for reranking and embedding.

Reranking ranks the passages of each query by score. Embedding ranks all passages of a
split by similarity to each anchor, or correlates similarities with given scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from flatout.engine.tasks._shared.metrics import correlation, ranks
from flatout.engine.tasks._task import Metrics

DEPTH = 10
"""The number of highest-ranked passages of each query that metrics consider."""
RELEVANT = 0.5
"""A passage is relevant if its label is at least this value."""
QUERIES_AT_ONCE = 1024
FIGURES = ("recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "ndcg_at_10")
Ints = npt.NDArray[np.int64]


class Retrieval(Metrics):
    """Retrieval metrics. For each distinct anchor, all distinct passages are ranked. A
    passage that is identical to the anchor is left out unless it is a positive."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` lists sizes of truncated vectors that are evaluated as well."""
        self._sizes = sizes
        self._vectors: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add vectors (k, H) and the labels (k, 3) that `Members.labels_of` returns."""
        self._vectors.append(logits.float())
        self._labels.append(labels)

    def kept(self) -> list[list[Tensor]]:
        """Return the vectors and the labels of all batches."""
        return [self._vectors, self._labels]

    def compute(self) -> dict[str, Any]:
        """Return the metrics named in FIGURES, or `spearman` for scored pairs. Metrics
        of the first `size` numbers of the vectors are called `<name>_dim_<size>`."""
        vectors = torch.cat(self._vectors)
        labels = torch.cat(self._labels).cpu().numpy()
        if (labels[:, 1] == -1).any():
            figures = partial(_correlation, *_pairs(labels))
        elif (labels[:, 1] == 1).any():
            figures = partial(_figures, _Wanted(labels))
        else:
            return {}
        found = figures(vectors)
        for size in self._sizes:
            own = figures(vectors[:, :size])
            found |= {f"{name}_dim_{size}": value for name, value in own.items()}
        return found


def _pairs(labels: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Return the indices (2, N) of the first and second text of N scored pairs, and
    their scores (N,). `labels` (K, 3) contains the labels of all texts."""
    order = np.argsort(labels[:, 0], kind="stable")
    places = labels[order, 1]
    rows = np.stack([order[places == 0], order[places == -1]])
    return rows, labels[rows[0], 2].astype(np.int32).view(np.float32)


def _correlation(
    rows: Ints, scores: npt.NDArray[np.float32], vectors: Tensor
) -> dict[str, float]:
    one, other = (
        normalize(vectors[torch.from_numpy(own).to(vectors.device)], dim=1)
        for own in rows
    )
    pairs = np.stack([(one * other).sum(1).cpu().numpy(), scores], 1)
    return {"spearman": correlation(ranks(pairs))}


class _Wanted:
    """The relevant passages of each query, given the labels (K, 3) of all texts."""

    def __init__(self, labels: npt.NDArray[Any]) -> None:
        samples, places, hashes = labels.T
        anchors, passages = np.flatnonzero(places == 0), np.flatnonzero(places > 0)
        texts, first, query_of = np.unique(hashes[anchors], True, True)
        self.queries: Ints = anchors[first]
        """The indices (Q,) of the queries among all vectors."""
        corpus, first, passage_of = np.unique(hashes[passages], True, True)
        self.corpus: Ints = passages[first]
        """The indices (C,) of the distinct passages among all vectors."""
        order = np.argsort(samples[anchors])
        is_positive = places[passages] == 1
        own = samples[passages[is_positive]]
        at = order[np.searchsorted(samples[anchors], own, sorter=order)]
        size = len(self.corpus)
        self.pairs: Ints = np.unique(query_of[at] * size + passage_of[is_positive])
        """The number query * C + passage of each relevant pair, in ascending order."""
        self.counts: Ints = np.bincount(self.pairs // size, minlength=len(texts))
        """The number of relevant passages of each query (Q,)."""
        place = np.minimum(np.searchsorted(corpus, texts), size - 1)
        themselves = np.arange(len(texts)) * size + place
        same = (corpus[place] == texts) & ~np.isin(themselves, self.pairs)
        self.themselves: Ints = np.where(same, place, -1)
        """The index of the passage that is identical to each query, or -1, as (Q,)."""


def _figures(wanted: _Wanted, vectors: Tensor) -> dict[str, float]:
    hits = _hits(wanted, normalize(vectors, dim=1))
    counts = wanted.counts
    ranks = np.arange(1, DEPTH + 1)
    gains = 1 / np.log2(ranks + 1)
    best = np.cumsum(gains)[np.minimum(counts, DEPTH) - 1]
    recalls = [(hits[:, :k].sum(1) / counts).mean() for k in (1, 5, 10)]
    mrr = (hits / ranks).max(1).mean()
    ndcg = ((hits * gains).sum(1) / best).mean()
    return dict(zip(FIGURES, map(float, (*recalls, mrr, ndcg)), strict=True))


def _hits(wanted: _Wanted, vectors: Tensor) -> npt.NDArray[np.bool_]:
    """Return a mask (Q, DEPTH) of whether the passage at each rank is relevant."""
    size, hits = len(wanted.corpus), []
    corpus = vectors[torch.from_numpy(wanted.corpus).to(vectors.device)]
    for start in range(0, len(wanted.queries), QUERIES_AT_ONCE):
        rows = wanted.queries[start : start + QUERIES_AT_ONCE]
        scores = vectors[torch.from_numpy(rows).to(vectors.device)] @ corpus.T
        themselves = wanted.themselves[start : start + QUERIES_AT_ONCE]
        same = np.flatnonzero(themselves >= 0)
        scores[same, themselves[same]] = -torch.inf
        best = scores.topk(min(DEPTH, size)).indices.cpu().numpy()
        numbers = np.arange(start, start + len(rows))[:, None] * size + best
        found = np.zeros((len(rows), DEPTH), bool)
        found[:, : best.shape[1]] = np.isin(numbers, wanted.pairs)
        hits.append(found)
    return np.concatenate(hits)


class Ranking(Metrics):
    """Ranking metrics. The passages given for each query are ranked by their logits."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, 1) and labels (k, 2) with the score and the query number."""
        self._rows.append(torch.cat([logits.float(), labels.float()], 1))

    def kept(self) -> list[list[Tensor]]:
        """Return tensors (k, 3) of logit, score and query number."""
        return [self._rows]

    def compute(self) -> dict[str, Any]:
        """Return the metrics, averaged over all queries with a relevant passage."""
        rows = torch.cat(self._rows).cpu().numpy()
        return ranking_figures(*rows[~np.isnan(rows[:, 1])].T)


def ranking_figures(
    logits: npt.NDArray[Any], labels: npt.NDArray[Any], queries: npt.NDArray[Any]
) -> dict[str, float]:
    """Return the ranking metrics for N rows, averaged over all queries that have a
    relevant passage. Passages with equal logits are ranked by ascending label, so that
    a model gains nothing by giving all passages the same score."""
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
        return found[known]

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
