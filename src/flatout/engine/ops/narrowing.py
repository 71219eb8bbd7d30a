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


def narrow_point(model: Any) -> Any:
    """The module with inputs (attended, layer input) in the last layer."""
    return model.base_model.encoder.layer[-1].attention.output


def set_targets(model: Any, index: Tensor | None) -> None:
    """Set the targets (K,) of the next forward pass for the narrow point, and for its
    attention, which on a CPU computes only these."""
    attention = model.base_model.encoder.layer[-1].attention
    attention.self.target_index = index
    attention.output.target_index = index


def narrow_last_layer(model: Any) -> bool:
    """Gather the targets at the narrow point of a model whose layer is attention.self,
    then attention.output(attended, input). The caller sets `target_index` (K,) on the
    narrow point before each forward pass. Repeated calls change nothing. Returns False
    if the layer has another structure."""
    point, layer = narrow_point(model), model.base_model.encoder.layer[-1]
    if _gather in point._forward_pre_hooks.values():
        return True
    if not is_plain(layer, layer.attention, layer.attention.self, point):
        return False
    point.register_forward_pre_hook(_gather)
    return True


def narrow_last_gated_layer(model: Any) -> bool:
    """`narrow_last_layer` for ModernBERT, whose layer adds the results of attention and
    feed-forward, with a norm before each."""
    layer = model.base_model.layers[-1]
    if hasattr(layer, "target_index"):
        return True
    if not is_plain(layer, layer.attn):
        return False
    layer.forward = MethodType(_gated_layer, layer)
    layer.attn.Wo.register_forward_pre_hook(_gather)
    set_gated_targets(model, None)
    return True


def set_gated_targets(model: Any, index: Tensor | None) -> None:
    """See `set_targets`."""
    layer = model.base_model.layers[-1]
    for module in (layer, layer.attn, layer.attn.Wo):
        module.target_index = index


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
    result: Tensor = states + layer.mlp(layer.mlp_norm(states))
    return result


def _gather(module: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Select the targets: (B, T, hidden) each -> (1, K, hidden) each."""
    index: Any = module.target_index
    return tuple(state.flatten(0, 1)[index].unsqueeze(0) for state in states)
