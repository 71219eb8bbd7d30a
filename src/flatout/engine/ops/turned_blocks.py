"""Attention and feed-forward of models with rotated positions, with our kernels.

The product for query, key and value goes to attention as it is, normed and turned in
place of seven kernels (kernels/rotary.py); that of gate and up has one kernel, and one
for its gradient (kernels/gated_silu.py). Decoders are Llama's kin; of encoders
ModernBERT makes the product by itself, and keeps Inductor's kernels for its gate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatout.engine.ops.attention import (
    FLASH4,
    is_causal,
    joined_attention,
    seen_span,
    window,
)
from flatout.engine.ops.projections import fused_product, is_fused
from flatout.engine.ops.row_by_row import Rule


class _Attention(nn.Module):
    """Over packed rows; causal, unless the config says `is_causal: false`."""

    q_proj: nn.Linear
    o_proj: nn.Linear
    head_dim: int
    scaling: float
    attention_dropout: float
    heads: int
    span: int | None
    """Tokens that a query sees, itself included; None: all before it."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        """(1, P, N) -> (1, P, N). `packed` holds cu_seqlens (R + 1,) and max_seqlen."""
        product = fused_product(self.q_proj, hidden_states)
        out = _attended(self, product, position_embeddings, packed)
        return self.o_proj(out), None


class _EncoderAttention(nn.Module):
    """To both sides, over packed rows."""

    Wqkv: nn.Linear
    Wo: nn.Linear
    out_drop: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        """As a decoder's."""
        product = self.Wqkv(hidden_states)
        out = _attended(self, product, position_embeddings, packed)
        return self.out_drop(self.Wo(out)), None


def _attended(
    module: Any,
    product: Tensor,
    turns: tuple[Tensor, Tensor],
    packed: dict[str, Any],
) -> Tensor:
    """Query, key and value side by side (1, P, (H + 2 G) D) -> (1, P, H D)."""
    turned = _turned(module, product, *turns)
    dropout = module.attention_dropout if module.training else 0.0
    causal = is_causal(module, packed)
    span = seen_span(module, module.span, causal)
    rule = Rule(module.scaling, dropout, causal, *window(span, causal))
    bounds, longest = packed["cu_seqlens"], packed["max_seqlen"]
    full_rows = packed.get("full_rows")
    given = (turned, module.heads, bounds, longest, rule, full_rows)
    out = joined_attention(*given, flash4=module.flash4)
    return out.flatten(1).unsqueeze(0)


def _turned(module: Any, product: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(1, P, (H + 2 G) D) -> (P, H + 2 G, D)."""
    from flatout.engine.ops.kernels.rotary import rotary

    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    heads = product.view(product.shape[1], -1, module.head_dim)
    turns = cos.squeeze(0), sin.squeeze(0)
    result: Tensor = rotary(heads, *turns, *weights, module.heads, eps)
    return result


class _FeedForward(nn.Module):
    """down(silu(gate) * up)."""

    gate_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        from flatout.engine.ops.kernels.gated_silu import gated_silu

        product = fused_product(self.gate_proj, x)
        gated = gated_silu(product.flatten(0, -2))
        out: Tensor = self.down_proj(gated.view(*product.shape[:-1], -1))
        return out


def fuse_decoder(model: Any) -> int:
    """Put them in place, after `fuse_projections`, where attention is over packed rows;
    how many layers."""
    config = model.config
    if not _turns_whole_heads(model):
        return 0
    layers = model.base_model.layers
    for layer in layers:
        attention = layer.self_attn
        if is_fused(attention.q_proj):
            attention.__class__ = _Attention
            attention.heads = config.num_attention_heads
            attention.span = _span(attention)
            attention.flash4 = config._attn_implementation == FLASH4
        if is_fused(layer.mlp.gate_proj) and config.hidden_act == "silu":
            layer.mlp.__class__ = _FeedForward
    return len(layers)


def fuse_encoder(model: Any) -> int:
    """ModernBERT's attention, likewise."""
    config, layers = model.config, model.base_model.layers
    for layer in layers:
        attention = layer.attn
        attention.__class__ = _EncoderAttention
        attention.heads = config.num_attention_heads
        attention.scaling = attention.head_dim**-0.5
        attention.span = attention.sliding_window
        attention.flash4 = config._attn_implementation == FLASH4
    return len(layers)


def _turns_whole_heads(model: Any) -> bool:
    """Some models turn a part of each head."""
    attention = model.base_model.layers[0].self_attn
    frequencies: Tensor = model.base_model.rotary_emb.inv_freq
    return 2 * len(frequencies) == int(attention.head_dim)


def _span(attention: Any) -> int | None:
    """Mistral's window is in the configuration, Qwen's in the layer; Llama has none,
    whatever its configuration says."""
    by_config = attention.config.model_type == "mistral"
    source = attention.config if by_config else attention
    span: int | None = getattr(source, "sliding_window", None)
    return span
