"""Limit the last layer to the targets, after its attention.

Only the head reads the last layer's output, and only at the targets: one token per row,
or the masked ones. In BERT-like layers the operations after attention work on single
tokens, so they receive only the targets; the loss and every gradient stay the same, and
for one target per row about 9/12 of a layer is saved.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from flatout.engine.ops.plain import is_plain


def narrow_last_layer(model: Any) -> tuple[nn.Module, ...]:
    """Gather the targets in a last layer that is attention.self, then
    attention.output(attended, input). Return the modules that read the targets
    (K,) of each forward pass from `target_index` (attention on a CPU computes only
    these); none if the layer has another structure. Repeated calls change nothing."""
    layer = model.base_model.encoder.layer[-1]
    point = layer.attention.output
    if not hasattr(point, "target_index"):
        if not is_plain(layer, layer.attention, layer.attention.self, point):
            return ()
        point.register_forward_pre_hook(_gather)
        point.target_index = None
    return layer.attention.self, point


def narrow_last_gated_layer(model: Any) -> tuple[nn.Module, ...]:
    """`narrow_last_layer` for ModernBERT, whose layer adds the results of attention and
    feed-forward, with a norm before each."""
    layer = model.base_model.layers[-1]
    if not hasattr(layer, "target_index"):
        if not is_plain(layer, layer.attn):
            return ()
        layer.forward = MethodType(_gated_layer, layer)
        layer.attn.Wo.register_forward_pre_hook(_gather)
        layer.target_index = None
    return layer, layer.attn, layer.attn.Wo


def _gated_layer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Last layer for the targets: (B, T, hidden) -> (1, K, hidden)."""
    normed = layer.attn_norm(hidden_states)
    attended, _ = layer.attn(normed, attention_mask=attention_mask, **kwargs)
    (states,) = _gather(layer, (hidden_states,))
    states = states + attended
    return states + layer.mlp(layer.mlp_norm(states))


def _gather(module: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Select the targets: (B, T, hidden) each -> (1, K, hidden) each."""
    index: Any = module.target_index
    return tuple(state.flatten(0, 1)[index].unsqueeze(0) for state in states)
