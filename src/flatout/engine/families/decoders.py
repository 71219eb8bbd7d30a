"""Decoder models such as GPT-2 and Llama."""

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
    # Rows may be packed because the kernel limits attention to one row (`cu_seqlens`),
    # positions start at 0, and nothing else mixes tokens (see test_model_parity.py).
    packs = True
    causal = True


class Gpt2(_Decoder):
    """The family of `gpt2` models: learned positions and plain feed-forward layers."""

    model_types = frozenset({"gpt2"})
    heads: ClassVar = _Decoder.heads | {HeadKind.TOKEN: tag_tokens}


class Llama(_Decoder):
    """Decoders with rotary embeddings and gated feed-forward layers."""

    model_types = frozenset({"llama", "mistral", "qwen2", "qwen3"})
    first_type = "llama"

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Join the gate and up projections, and the query, key and value projections. A
        fused kernel applies norms and rotary embeddings."""
        fused = {"joined gate and up": fuse_gates(model)}
        if plan.joined:
            fused[ATTENTION] = fuse_decoder(model)
        return fused
