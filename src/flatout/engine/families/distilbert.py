"""The DistilBERT family."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flatout.engine.families._family import ATTENTION, Family, FusePlan, tag_tokens
from flatout.engine.ops.joined_blocks import fuse_distilbert
from flatout.engine.tasks import HeadKind


def _relu_classifier(model: Any, hidden: Tensor) -> Any:
    pooled = model.pre_classifier(hidden).relu()
    return model.classifier(model.dropout(pooled))


def _pieces(model: Any, hidden: Tensor) -> Any:
    hidden = model.activation(model.vocab_transform(hidden))
    return model.vocab_projector(model.vocab_layer_norm(hidden))


class DistilBert(Family):
    """The family of `distilbert` models."""

    model_types = frozenset({"distilbert"})
    heads: ClassVar = {
        HeadKind.ROW: _relu_classifier,
        HeadKind.TOKEN: tag_tokens,
        HeadKind.VOCABULARY: _pieces,
    }
    packs = True

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        return {ATTENTION: fuse_distilbert(model)} if plan.joined else {}
