"""Bidirectional language modelling (Peters et al. 2018), which predicts the next and
the previous token at each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._shared.cross_entropy import Pieces
from flatout.engine.tasks._task import (
    IGNORED,
    Device,
    HeadKind,
    Metrics,
    Targets,
    Tensor,
    Texts,
)


class BidirectionalLM(Pieces):
    """Predict the next and the previous token at each position of a row. There is no
    next token at the last position, and no previous token at the first position. The
    loss is summed over both directions and divided by the number of labels."""

    auto_class = "AutoModelForPreTraining"
    architectures = ("BilmForPreTraining",)
    head_kind = HeadKind.DIRECTIONS
    figures: ClassVar[Mapping[str, bool]] = {"loss": False} | {
        f"{side}{name}": name != "perplexity"
        for side in ("", "forward_", "backward_")
        for name in ("perplexity", "accuracy", "top_5_accuracy")
    }
    label_shape: ClassVar[tuple[int, ...]] = (2,)
    texts = Texts(predicts_neighbours=True, joined=True)
    pipeline_tag = "feature-extraction"
    targets_per_token = 2.0

    def model_fault(self, config: Any) -> str | None:
        if getattr(config, "num_directions", 1) == 2:
            return None
        return (
            f"model.task bidirectional-lm needs a model that reads in two directions, "
            f"and {config.model_type} does not: set model.config.model_type: bilm"
        )

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return labels (T, 2) for each row of T tokens, or no labels if T is 1."""
        labels = [_neighbours(ids) for ids in rows.views(row_ids)]
        return Targets([np.arange(len(own)) for own in labels], labels)

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of targets: two per token except the first of each row."""
        return 2 * int((rows.lengths(row_ids) - 1).clip(0).sum())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of logits (K, 2, V) and labels (K, 2)."""
        return super().loss(logits.flatten(0, 1), labels.flatten())

    def real(self, labels: Tensor) -> Tensor:
        return labels != IGNORED

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.metrics import Directions

        return Directions(device)


def _neighbours(ids: npt.NDArray[Any]) -> Ints:
    """Return the next and previous token of each of `ids` (T,) as an array (T, 2)."""
    labels = np.full((len(ids), 2), IGNORED, np.int64)
    labels[:-1, 0] = ids[1:]
    labels[1:, 1] = ids[:-1]
    return labels if len(ids) > 1 else labels[:0]
