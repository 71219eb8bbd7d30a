"""Counts of tasks whose rows have several labels each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.engine.tasks._task import Metrics


class LabelCounts(Metrics):
    """Right, predicted and true labels, and rows in which all labels are right."""

    def __init__(
        self,
        num_labels: int,
        given: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """`given`: logits (k, L) -> which labels are predicted (k, L)."""
        self._given = given
        self._counts = torch.zeros((3, num_labels), dtype=torch.int64, device=device)
        self._rows = torch.zeros(2, dtype=torch.int64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, L) and labels (k, L) of 0 and 1; NaN without a target."""
        real = ~labels.isnan().any(-1)
        true = labels == 1
        given = self._given(logits) & real.unsqueeze(-1)
        self._counts += torch.stack([(true & given).sum(0), given.sum(0), true.sum(0)])
        right = (true == given).all(-1) & real
        self._rows += torch.stack([right.sum(), real.sum()])

    def tensors(self) -> list[Tensor]:
        return [self._counts, self._rows]

    def compute(self) -> dict[str, Any]:
        """Return the figures of scikit-learn: `f1_micro` over all labels, `f1_macro`
        the mean of theirs, `accuracy` of whole rows; all in [0, 1]."""
        right, rows = self._rows.tolist()
        counts = self._counts.tolist()
        each = [f1_of(*label) for label in zip(*counts, strict=True)]
        found = {
            "f1_micro": f1_of(*map(sum, counts)),
            "f1_macro": sum(each) / max(1, len(each)),
        }
        return found | ({"accuracy": right / rows} if rows else {})


def f1_of(right: int, given: int, true: int) -> float:
    """Return F1; 0 without any true or predicted label."""
    return 2 * right / (given + true) if given + true else 0.0
