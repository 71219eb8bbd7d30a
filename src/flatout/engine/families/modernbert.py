"""ModernBERT: rotated positions, windows, gated feed-forward."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flatout.engine.families._family import Family
from flatout.engine.tasks import HeadKind


def _classifier(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.drop(model.head(hidden)))


def _pieces(model: Any, hidden: Tensor) -> Any:
    return model.decoder(model.head(hidden))


class ModernBert(Family):
    """modernbert."""

    model_types = frozenset({"modernbert"})
    heads: ClassVar = {
        HeadKind.ROW: _classifier,
        HeadKind.TOKEN: _classifier,
        HeadKind.VOCABULARY: _pieces,
    }
    packs = True
    gated = True

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        """As `classifier_pooling` says."""
        return kind is HeadKind.ROW and config.classifier_pooling == "mean"
