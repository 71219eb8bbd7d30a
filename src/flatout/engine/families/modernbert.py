"""The ModernBERT family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from flatout.engine.families._family import ATTENTION, Family, FusePlan
from flatout.engine.ops.joined_blocks import fuse_encoder
from flatout.engine.ops.narrowing import narrow_last_gated_layer
from flatout.engine.tasks import HeadKind


def _normed_classifier(model: Any, hidden: Tensor) -> Any:
    return model.classifier(model.drop(model.head(hidden)))


class ModernBert(Family):
    """The family of `modernbert` models."""

    model_types = frozenset({"modernbert"})
    heads: ClassVar = {
        HeadKind.ROW: _normed_classifier,
        HeadKind.TOKEN: _normed_classifier,
        HeadKind.VOCABULARY: lambda model, hidden: model.decoder(model.head(hidden)),
    }
    packs = True

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        return kind is HeadKind.ROW and config.classifier_pooling == "mean"

    def narrow(self, model: Any) -> Sequence[nn.Module]:
        return narrow_last_gated_layer(model)

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Replace attention layers to apply rotary embeddings with a fused kernel."""
        return {ATTENTION: fuse_encoder(model)} if plan.joined else {}
