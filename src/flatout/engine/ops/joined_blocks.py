"""Attention and feed-forward layers over packed rows, with fused projections.

Projections of the same input (query, key and value, or gate and up) become one matmul.
On an H200, a matmul with a 768 x 768 weight runs at 460 TFLOP/s, and one with a 768 x
3072 weight runs at 710 TFLOP/s. The layers keep their weights, so checkpoints do not
change. Layers with adapters are called one by one. The joined product is passed to
attention without being split. In models with rotary embeddings, one kernel instead of
seven applies norms and rotary embeddings to the product (kernels/rotary.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engine.ops.attention import (
    is_causal,
    joined_attention,
    seen_span,
    window,
)
from flatout.engine.ops.plain import are_called, are_matrices, is_alone, is_plain
from flatout.engine.ops.row_by_row import Rule


def joined_product(layers: Sequence[Any], states: Tensor) -> Tensor:
    """Return the outputs of all linear `layers` for `states` (..., in), concatenated
    along the last dimension."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return torch.cat([layer(states) for layer in layers], -1)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight for layer in layers])
    return F.linear(states, weight, torch.cat(biases) if biases else None)


class _BertAttention(nn.Module):
    """The attention of BERT and RoBERTa with fused projections."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        """Return the new states (1, P, N) for `hidden_states` (1, P, N). `packed`
        contains `cu_seqlens` (R + 1,) and `max_seqlen`."""
        product = joined_product((self.query, self.key, self.value), hidden_states)
        heads = product.view(product.shape[1], 3 * self.num_attention_heads, -1)
        return _attended(self, heads, self.dropout.p, packed), None


class _DistilBertAttention(nn.Module):
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        product = joined_product((self.q_lin, self.k_lin, self.v_lin), hidden_states)
        heads = product.view(product.shape[1], 3 * self.n_heads, -1)
        return self.out_lin(_attended(self, heads, self.dropout.p, packed)), None


class _DecoderAttention(nn.Module):
    """The attention of Llama-like models with fused projections. It is causal unless
    the config makes the model bidirectional."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        heads = _rotate_heads(
            self, joined_product(layers, hidden_states), position_embeddings
        )
        return self.o_proj(_attended(self, heads, self.attention_dropout, packed)), None


class _ModernBertAttention(nn.Module):
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **packed: Any,
    ) -> tuple[Tensor, None]:
        heads = _rotate_heads(self, self.Wqkv(hidden_states), position_embeddings)
        out = _attended(self, heads, self.attention_dropout, packed)
        return self.out_drop(self.Wo(out)), None


class _FeedForward(nn.Module):
    """A gated feed-forward layer, down(activation(gate) * up)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the new states (..., N) for the states `x` (..., N)."""
        gate, up = joined_product((self.gate_proj, self.up_proj), x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


def _attended(
    module: Any, heads: Tensor, dropout: float, packed: dict[str, Any]
) -> Tensor:
    """Return the attention output (1, P, H * D). `heads` (P, H + 2 G, D) contains
    query, key and value. `packed` contains the keyword arguments for packed rows."""
    causal = is_causal(module, packed)
    span = seen_span(module, module.span, causal)
    kept_whole = dropout if module.training else 0.0
    rule = Rule(module.scaling, kept_whole, causal, *window(span, causal))
    bounds, longest = packed["cu_seqlens"], packed["max_seqlen"]
    out = joined_attention(heads, module.heads, bounds, longest, rule)
    return out.flatten(1).unsqueeze(0)


def _rotate_heads(module: Any, product: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Apply norms and rotary embeddings to query and key in the joined `product` (1, P,
    (H + 2 G) * D), and return it as (P, H + 2 G, D)."""
    from flatout.engine.ops.kernels.rotary import rotary

    norms = _norms(module)
    weights = [None if norm is None else norm.weight for norm in norms]
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    heads = product.view(product.shape[1], -1, module.head_dim)
    cos, sin = (turn.squeeze(0) for turn in turns)
    return rotary(heads, cos, sin, *weights, module.heads, eps)


def _norms(attention: Any) -> list[Any]:
    """Return the norms of query and key. Norms that the model lacks are None."""
    return [getattr(attention, name, None) for name in ("q_norm", "k_norm")]


def fuse_bert(model: Any) -> int:
    """Fuse the attention of all unchanged layers, and return their number."""
    heads = model.config.num_attention_heads
    layers = [layer.attention.self for layer in model.base_model.encoder.layer]
    fitting = [m for m in layers if _joins(m, m.query, m.key, m.value)]
    return _replace(fitting, _BertAttention, heads)


def fuse_distilbert(model: Any) -> int:
    """Replace the attention of DistilBERT in the same way as `fuse_bert`."""
    layers = [layer.attention for layer in model.base_model.transformer.layer]
    fitting = [m for m in layers if _joins(m, m.q_lin, m.k_lin, m.v_lin)]
    return _replace(fitting, _DistilBertAttention, model.config.n_heads)


def fuse_decoder(model: Any) -> int:
    """Replace the attention of decoders in the same way as `fuse_bert`. Return 0 if
    rotary embeddings do not cover the whole head."""
    found = [layer.self_attn for layer in model.base_model.layers]
    if 2 * len(model.base_model.rotary_emb.inv_freq) != found[0].head_dim:
        return 0
    fitting = [
        attention
        for attention in found
        if _joins(attention, attention.q_proj, attention.k_proj, attention.v_proj)
        and is_alone(*filter(None, _norms(attention)))
    ]
    spans = [_span(attention) for attention in fitting]
    return _replace(fitting, _DecoderAttention, model.config.num_attention_heads, spans)


def fuse_gates(model: Any) -> int:
    """Join the gate and up projections in unchanged layers, and return their number."""
    found = [layer.mlp for layer in model.base_model.layers]
    fitting = [m for m in found if _fits(m, m.gate_proj, m.up_proj)]
    for module in fitting:
        module.__class__ = _FeedForward
    return len(fitting)


def fuse_encoder(model: Any) -> int:
    """Replace the attention of ModernBERT in the same way as `fuse_bert`."""
    fitting = [layer.attn for layer in model.base_model.layers if is_plain(layer.attn)]
    for attention in fitting:
        attention.scaling = attention.head_dim**-0.5
    spans = [attention.sliding_window for attention in fitting]
    heads = model.config.num_attention_heads
    return _replace(fitting, _ModernBertAttention, heads, spans)


def _fits(module: nn.Module, *layers: nn.Module) -> bool:
    return is_plain(module) and are_matrices(*layers)


def _joins(attention: nn.Module, *layers: nn.Module) -> bool:
    """Return whether the outputs of `layers` may be joined. This includes layers with
    adapters, because they can be called one by one before their outputs are joined."""
    return _fits(attention, *layers) or (is_plain(attention) and are_called(*layers))


def _replace(
    modules: list[Any], kind: type, heads: int, spans: list[int | None] | None = None
) -> int:
    """Replace the class of `modules` with `kind`, and return the number of modules.
    `spans` contains the window size of each module, including the query itself, or None
    for attention to all tokens."""
    for module, span in zip(modules, spans or [None] * len(modules), strict=True):
        module.__class__, module.heads, module.span = kind, heads, span
    return len(modules)


def _span(attention: Any) -> int | None:
    """Return the attention window of a layer, or None. Mistral stores it in the config,
    and Qwen in the layer. Llama ignores the config key."""
    by_config = attention.config.model_type == "mistral"
    source = attention.config if by_config else attention
    return getattr(source, "sliding_window", None)
