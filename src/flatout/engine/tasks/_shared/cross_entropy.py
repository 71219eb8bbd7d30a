"""Base classes of tasks in which each target is one of many classes or tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._task import (
    IGNORED,
    Device,
    LossOptions,
    Metrics,
    Task,
    Tensor,
)


class CrossEntropy(Task):
    """Cross entropy of logits (K, C) and labels (K,), summed over K targets."""

    takes_options = frozenset({"label_smoothing", "focal_gamma"})
    figures: ClassVar[Mapping[str, bool]] = {"loss": False, "accuracy": True}
    _weights: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused kernel may compute the loss. This is true if no loss options
        are set and no custom task overrides `loss`."""
        ours = type(self).loss.__module__.startswith("flatout.engine.tasks.")
        return ours and self.loss_options == LossOptions()

    def divisor(self, rows: Rows, row_ids: Ints, epoch: int) -> float | None:
        """Return the sum of the targets' class weights, which is also the divisor of
        PyTorch's weighted mean. Return None if there are no class weights."""
        if self.loss_options.class_weights is None:
            return None
        targets = self.targets(rows, row_ids, epoch, pools_last=False)
        labels = np.concatenate(targets.labels)
        labels = labels if labels.ndim == 1 else labels[:, 0]
        weights = np.array(self.loss_options.class_weights)
        return float(weights[labels[labels != IGNORED]].sum())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        options, logits = self.loss_options, logits.float()
        losses = cross_entropy(
            logits,
            labels,
            weight=self._weights_on(logits.device),
            label_smoothing=options.label_smoothing,
            ignore_index=IGNORED,
            reduction="none" if options.focal_gamma else "sum",
        )
        if options.focal_gamma:
            losses = (losses * _focus(logits, labels, options.focal_gamma)).sum()
        return losses

    def _weights_on(self, device: Device) -> Tensor | None:
        """Return the class weights (C,), if any, which are copied to `device` once."""
        weights = self.loss_options.class_weights
        if weights is None:
            return None
        if self._weights is None or self._weights.device != device:
            import torch

            self._weights = torch.tensor(weights, dtype=torch.float32, device=device)
        return self._weights

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        return (self.chosen(logits) == labels).sum(), (labels != IGNORED).sum()

    def chosen(self, logits: Any) -> Any:
        """Return the predicted classes (...) for logits (..., C)."""
        return logits.argmax(-1)

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.metrics import Hits

        return Hits(device)

    def chance_loss(self, num_outputs: int) -> float | None:
        """Return the loss of equal logits: ln(C) for C classes, and with a focal loss
        ln(C) times (1 - 1 / C) ** gamma."""
        rest = 1 - 1 / num_outputs
        return float(rest**self.loss_options.focal_gamma) * math.log(num_outputs)

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        from torch.nn.functional import cross_entropy

        predictions, names = self.chosen(logits), self.label_names
        return {
            "loss": cross_entropy(logits, labels, reduction="none"),
            "label": [names[number] for number in labels.tolist()],
            "prediction": [names[number] for number in predictions.tolist()],
            "score": logits.softmax(-1).gather(-1, predictions[:, None]).squeeze(-1),
            "wrong": predictions != labels,
        }


class Pieces(CrossEntropy):
    """Base class of language models, whose targets are tokens of the vocabulary."""

    figures: ClassVar[Mapping[str, bool]] = {
        "loss": False,
        "accuracy": True,
        "perplexity": False,
    }


def binary_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross entropy of each logit in fp32, 0 for NaN labels."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    losses = binary_cross_entropy_with_logits(
        logits.float(), labels.nan_to_num(), reduction="none"
    )
    return losses.where(~labels.isnan(), 0.0)


def _focus(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Return the factor (1 - p) ** gamma of the focal loss for each target, as a tensor
    (K,). p is the probability of the label, according to logits (K, C)."""
    places = labels.clamp(min=0)[:, None]
    known = logits.log_softmax(-1).gather(-1, places).squeeze(-1)
    # A power with an exponent below 1 has no derivative at 0.
    return (-known.expm1()).clamp(min=1e-8) ** gamma
