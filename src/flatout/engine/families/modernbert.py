"""ModernBERT: rotary positions, windows, gated feed-forward."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flatout.engine.families._family import ATTENTION, Family, FusePlan
from flatout.engine.ops.joined_blocks import fuse_encoder
from flatout.engine.ops.narrowing import (
    narrow_last_gated_layer,
    set_gated_targets,
)
from flatout.engine.tasks import HeadKind


def _classifier(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.drop(model.head(hidden)))


class ModernBert(Family):
    """Family of `modernbert`."""

    model_types = frozenset({"modernbert"})
    heads: ClassVar = {
        HeadKind.ROW: _classifier,
        HeadKind.TOKEN: _classifier,
        HeadKind.VOCABULARY: lambda model, hidden: model.decoder(model.head(hidden)),
    }
    packs = True

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        return kind is HeadKind.ROW and config.classifier_pooling == "mean"

    def narrow(self, model: Any) -> bool:
        return narrow_last_gated_layer(model)

    def set_targets(self, model: Any, index: Tensor) -> None:
        set_gated_targets(model, index)

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Rotate query and key in a fused kernel before attention."""
        return {ATTENTION: fuse_encoder(model)} if plan.joined else {}
