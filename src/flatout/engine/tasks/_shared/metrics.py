"""Evaluation metrics, accumulated as sums on the device.

Metrics that need sorted values, such as the AUC, keep all values. They are gathered
from all ranks once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatout.engine.tasks._task import IGNORED, Metrics

LIKELIEST = partial(torch.argmax, dim=-1)
TOP_K = 5
MOST_RANKED_CLASSES = 32
"""The maximum number of classes for the AUC, which needs the scores of all rows."""


class Hits(Metrics):
    """Accuracy for language models, which have too many classes for other metrics."""

    def __init__(self, device: torch.device) -> None:
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._judged = torch.zeros_like(self._hits)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, C) and labels (k,)."""
        self._hits += (logits.argmax(-1) == labels).sum()
        self._judged += (labels != IGNORED).sum()

    def tensors(self) -> list[Tensor]:
        return [self._hits, self._judged]

    def compute(self) -> dict[str, Any]:
        """Return the accuracy, or nothing if there were no targets."""
        judged = int(self._judged)
        return {"accuracy": int(self._hits) / judged} if judged else {}


class Classes(Metrics):
    """Single-label classification metrics, such as F1, top-5 accuracy and the AUC."""

    def __init__(
        self,
        num_classes: int,
        device: torch.device,
        chosen: Callable[[Tensor], Tensor] = LIKELIEST,
    ) -> None:
        """`chosen` maps logits (k, C) to predicted classes (k,)."""
        self._chosen = chosen
        self._num_classes = num_classes
        self._counts = torch.zeros((3, num_classes), dtype=torch.int64, device=device)
        """For each class, the number of correct, true and predicted rows."""
        self._among_first = torch.zeros((), dtype=torch.int64, device=device)
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, C) and labels (k,)."""
        real, predicted = labels != IGNORED, self._chosen(logits)
        # Rows without a target add 0 to class 0, so that no shape depends on the data.
        known, right = torch.where(real, labels, 0), labels == predicted
        for row, (kinds, chosen) in enumerate(
            ((known, right & real), (known, real), (predicted, real))
        ):
            self._counts[row].index_add_(0, kinds, chosen.long())
        if self._num_classes > TOP_K:
            first = logits.topk(TOP_K, -1).indices
            self._among_first += (first == labels[:, None]).sum()
        if self._num_classes <= MOST_RANKED_CLASSES:
            self._scores.append(_class_scores(logits.float()))
            self._labels.append(labels)

    def tensors(self) -> list[Tensor]:
        return [self._counts, self._among_first]

    def kept(self) -> list[list[Tensor]]:
        """Return a list of scores, (k, C) or (k, 1), and a list of labels (k,)."""
        return [self._scores, self._labels] if self._scores else []

    def compute(self) -> dict[str, Any]:
        """Return the metrics named in `SequenceClassification.figures`, or nothing if
        there were no targets."""
        counts = self._counts.double().cpu()
        judged = int(counts[1].sum())
        if not judged:
            return {}
        found = figures_of_counts(*counts)
        if self._num_classes > TOP_K:
            found["top_5_accuracy"] = int(self._among_first) / judged
        if self._scores:
            parts = torch.cat(self._scores), torch.cat(self._labels)
            found["auc"] = _mean_area(*(part.cpu().numpy() for part in parts))
        return found


class Numbers(Metrics):
    """Regression metrics: errors and correlations of one predicted number per row."""

    def __init__(self) -> None:
        self._pairs: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, 1) and labels (k,). A label is NaN if there is no target."""
        self._pairs.append(torch.stack([logits[:, 0].float(), labels.float()], 1))

    def kept(self) -> list[list[Tensor]]:
        """Return tensors (k, 2) with a prediction and a label per row."""
        return [self._pairs]

    def compute(self) -> dict[str, Any]:
        """Return mse, mae, pearson and spearman, or nothing if there are no targets."""
        pairs = torch.cat(self._pairs).double().cpu().numpy()
        pairs = pairs[~np.isnan(pairs[:, 1])]
        if not len(pairs):
            return {}
        error = pairs[:, 0] - pairs[:, 1]
        return {
            "mse": float(np.square(error).mean()),
            "mae": float(np.abs(error).mean()),
            "pearson": correlation(pairs),
            "spearman": correlation(ranks(pairs)),
        }


def figures_of_counts(
    right: Tensor, true: Tensor, predicted: Tensor
) -> dict[str, float]:
    """Return metrics from the number of correct, true and predicted rows per class
    (C,), averaged over classes that occur. A division by zero gives zero."""
    there = true + predicted > 0
    precision = (right / predicted.clamp(min=1))[there].mean()
    recall = (right / true.clamp(min=1))[there].mean()
    f1 = (2 * right / (true + predicted).clamp(min=1))[there].mean()
    accuracy = float(right.sum() / true.sum())
    return {
        "accuracy": accuracy,
        "f1_macro": float(f1),
        "f1_micro": accuracy,  # each row has one class
        "precision_macro": float(precision),
        "recall_macro": float(recall),
        "matthews": _matthews(right, true, predicted),
    }


def _matthews(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """Return the Matthews correlation (Gorodkin 2004), or 0 if undefined."""
    count = true.sum()
    both = right.sum() * count - true @ predicted
    spread = (count**2 - true @ true) * (count**2 - predicted @ predicted)
    return float(both / spread.sqrt()) if spread > 0 else 0.0


def _class_scores(logits: Tensor) -> Tensor:
    """Return scores (k, C) by which rows are ranked, or (k, 1) for two classes."""
    if logits.shape[-1] == 2:
        return logits[:, 1:] - logits[:, :1]
    return logits.softmax(-1)


def _mean_area(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Return the mean one-versus-rest AUC of classes for which it is defined."""
    real = labels != IGNORED
    scores, labels = scores[real], labels[real]
    first = 1 if scores.shape[1] == 1 else 0
    sides = [labels == first + place for place in range(scores.shape[1])]
    areas = [area_under_curve(*pair) for pair in zip(scores.T, sides, strict=True)]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def area_under_curve(scores: npt.NDArray[Any], positive: npt.NDArray[Any]) -> float:
    """Return the area under the ROC curve for `scores` (N,) and booleans `positive`
    (N,): the fraction of (positive, negative) pairs in which the positive row has the
    higher score. Ties count half (Mann and Whitney 1947). The area is NaN if all rows
    are positive, all are negative, or a score is NaN."""
    ours, others = int(positive.sum()), int((~positive).sum())
    if not ours * others or np.isnan(scores).any():
        return math.nan
    above = ranks(scores[:, None])[positive].sum() - ours * (ours + 1) / 2
    return float(above) / (ours * others)


def correlation(pairs: npt.NDArray[Any]) -> float:
    """Return the Pearson correlation of `pairs` (N, 2), or NaN if a column is
    constant."""
    if not np.ptp(pairs, axis=0).all():
        return math.nan
    return float(np.asarray(np.corrcoef(pairs.T.astype(np.float64)))[0, 1])


def ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the ranks (from 1) in each column of `values` (N, C). Tied values get
    their mean rank. scipy.stats is not used, because its import takes 0.5 s."""
    return pd.DataFrame(values).rank().to_numpy()


PREFIXES = ("", "forward_", "backward_")


class Directions(Metrics):
    """Perplexity, accuracy and top-5 accuracy, per direction and for both together."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._counts = torch.zeros(3, 2, dtype=torch.int64, device=device)
        """For each direction, the number of targets, the number of correct predictions,
        and the number of targets among the TOP_K most likely tokens."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, 2, V) and labels (k, 2)."""
        losses = cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        self._losses += losses.view(-1, 2).sum(0, dtype=torch.float64)
        best = logits.topk(min(TOP_K, logits.shape[-1]), -1).indices
        found = best == labels.unsqueeze(-1)
        seen = torch.stack([labels != IGNORED, found[..., 0], found.any(-1)])
        self._counts += seen.sum(1)

    def tensors(self) -> list[Tensor]:
        return [self._losses, self._counts]

    def compute(self) -> dict[str, Any]:
        """Return the metrics named in `BidirectionalLM.figures`. The perplexity for
        both directions is the exponential of their mean loss."""
        sums = torch.cat([self._losses[None], self._counts.double()]).cpu()
        sums = torch.cat([sums.sum(1, keepdim=True), sums], 1)
        losses, targets, right, among = sums
        figures = {
            "perplexity": (losses / targets).exp(),
            "accuracy": right / targets,
            f"top_{TOP_K}_accuracy": among / targets,
        }
        return {
            f"{prefix}{name}": float(values[place])
            for place, prefix in enumerate(PREFIXES)
            if targets[place]
            for name, values in figures.items()
        }
