"""The BERT and RoBERTa families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatout.engine.families._family import (
    ATTENTION,
    Family,
    FusePlan,
    lm_head,
    tag_tokens,
)
from flatout.engine.ops.blocks import fuse_blocks
from flatout.engine.ops.joined_blocks import fuse_bert
from flatout.engine.ops.narrowing import narrow_last_layer
from flatout.engine.tasks import HeadKind


def _pooled_classifier(model: Any, hidden: Tensor) -> Any:
    # The pooler reads the first token of each row, so pass it rows of one token.
    pooled = model.base_model.pooler(hidden.unsqueeze(1))
    return model.classifier(model.dropout(pooled))


class Bert(Family):
    """The family of `bert` models."""

    model_types = frozenset({"bert"})
    heads: ClassVar = {
        HeadKind.ROW: _pooled_classifier,
        HeadKind.TOKEN: tag_tokens,
        HeadKind.VOCABULARY: lambda model, hidden: model.cls(hidden),
    }
    packs = True

    def narrow(self, model: Any) -> Sequence[nn.Module]:
        return narrow_last_layer(model)

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Join query, key and value, and fuse the output blocks."""
        fused = {}
        if plan.joined:
            fused[ATTENTION] = fuse_bert(model)
        if plan.residual_bf16 and plan.has_triton:
            fused["output blocks"] = fuse_blocks(model, plan.noise)
        return fused


class Roberta(Bert):
    """The family of `roberta` models. Unlike in BERT, position ids start after the
    padding id and skip pad tokens, even inside a text, and the classification head has
    no pooler."""

    model_types = frozenset({"roberta"})
    heads: ClassVar = Bert.heads | {
        HeadKind.ROW: lambda model, hidden: model.classifier(hidden.unsqueeze(1)),
        HeadKind.VOCABULARY: lm_head,
    }

    def packed_positions(self, config: Any, batch: Mapping[str, Tensor]) -> Tensor:
        places, pad = batch["position_ids"], config.pad_token_id
        counts = (batch["input_ids"] != pad).long()
        total = counts.cumsum(1)
        first = torch.arange(places.shape[1], device=places.device) - places
        return (total - (total - counts).gather(1, first)) * counts + pad
