"""Metrics of language models that read in two directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatout.engine.tasks._shared.metrics import TOP_K
from flatout.engine.tasks._task import IGNORED, Metrics

PREFIXES = ("", "forward_", "backward_")


class Directions(Metrics):
    """Perplexity, accuracy and top-5 accuracy: of both directions, and of each."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._counts = torch.zeros(3, 2, dtype=torch.int64, device=device)
        """Targets, right ones, and those among the likeliest, by direction."""

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
        """Return the figures named in `BidirectionalLM.figures`; the perplexity of both
        directions is that of their mean loss."""
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
