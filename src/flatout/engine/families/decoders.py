"""Decoders: GPT-2, Llama and similar models."""

from __future__ import annotations

from typing import Any, ClassVar

from flatout.engine.families._family import (
    ATTENTION,
    Family,
    FusePlan,
    lm_head,
    tag_tokens,
)
from flatout.engine.ops.joined_blocks import fuse_decoder, fuse_gates
from flatout.engine.tasks import HeadKind


class _Decoder(Family):
    heads: ClassVar = {
        HeadKind.ROW: lambda model, hidden: model.score(hidden),
        HeadKind.TOKEN: lambda model, hidden: model.score(model.dropout(hidden)),
        HeadKind.VOCABULARY: lm_head,
    }
    matrix_heads = frozenset({HeadKind.VOCABULARY})
    # Rows may be packed: the kernel limits attention to a row (`cu_seqlens`), positions
    # start at 0, and no other part mixes tokens (tests: test_model_parity.py).
    packs = True
    causal = True


class Gpt2(_Decoder):
    """Family of `gpt2`: learned positions, a feed-forward part with two matrices."""

    model_types = frozenset({"gpt2"})
    heads: ClassVar = _Decoder.heads | {HeadKind.TOKEN: tag_tokens}


class Llama(_Decoder):
    """Rotary positions, gated feed-forward, query heads that share keys."""

    model_types = frozenset({"llama", "mistral", "qwen2", "qwen3"})
    first_type = "llama"

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Join gate and up; join query, key and value, normalised and rotated before
        attention."""
        fused = {"joined gate and up": fuse_gates(model)}
        if plan.joined:
            fused[ATTENTION] = fuse_decoder(model)
        return fused
