"""Decoders: GPT-2, and Llama with its kin."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flatout.engine.families._family import Family, FusePlan, lm_head, tag_tokens
from flatout.engine.ops.joined_blocks import fuse_decoder, fuse_gates
from flatout.engine.tasks import HeadKind


def _score(model: Any, hidden: Tensor) -> Any:
    return model.score(hidden)


def _score_tokens(model: Any, hidden: Tensor) -> Any:
    return model.score(model.dropout(hidden))


class _Decoder(Family):
    heads: ClassVar = {
        HeadKind.ROW: _score,
        HeadKind.TOKEN: _score_tokens,
        HeadKind.VOCABULARY: lm_head,
    }
    matrix_heads = frozenset({HeadKind.VOCABULARY})
    # Rows may be packed: the kernel keeps attention inside of a row (`cu_seqlens`),
    # positions start at 0, and nothing else mixes tokens (tests: test_model_parity.py).
    packs = True
    causal = True


class Gpt2(_Decoder):
    """gpt2: positions are learnt, the feed-forward part has two matrices."""

    model_types = frozenset({"gpt2"})
    heads: ClassVar = _Decoder.heads | {HeadKind.TOKEN: tag_tokens}


class Llama(_Decoder):
    """Rotated positions, gated feed-forward, query heads that share keys."""

    model_types = frozenset({"llama", "mistral", "qwen2", "qwen3"})
    first_type = "llama"

    def fuse(self, model: Any, plan: FusePlan) -> None:
        """Gate and up as one product; query, key and value as one, normed and turned
        on their way to attention."""
        fuse_gates(model)
        if plan.joined:
            fuse_decoder(model)
