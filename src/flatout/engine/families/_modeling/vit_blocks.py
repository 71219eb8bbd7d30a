"""Vision transformer layers with fewer kernel launches.

One matmul computes query, key and value. The last layer computes its query, output,
norm and feed-forward part only for the first token, because the head reads no other
token. Logits and gradients stay the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer

from flatout.engine.ops.joined_blocks import joined_product
from flatout.engine.ops.plain import are_matrices


class Attention(ViTAttention):  # type: ignore[misc]
    """A replacement for ViTAttention with the same weights and without a mask."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the new states (B, T, hidden) for `hidden_states` (B, T, hidden)."""
        product = joined_product((self.q_proj, self.k_proj, self.v_proj), hidden_states)
        return _attended(self, product.chunk(3, -1)), None


def _attended(attention: Any, parts: Iterable[Tensor]) -> Tensor:
    """Return the attention output (B, T, hidden). `parts` are query, key and value,
    each of shape (B, T, H * D)."""
    q, k, v = (
        part.view(*part.shape[:2], -1, attention.head_dim).transpose(1, 2)
        for part in parts
    )
    dropout = attention.attention_dropout if attention.training else 0.0
    found = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, scale=attention.scaling
    )
    return attention.o_proj(found.transpose(1, 2).flatten(2))


def fuse_attention(model: Any) -> int:
    """Replace attention layers that use PyTorch's SDPA, and return their number."""
    if "sdpa" not in model.config._attn_implementation:
        return 0
    found = [m for m in model.modules() if type(m) is ViTAttention]
    fitting = [m for m in found if are_matrices(m.q_proj, m.k_proj, m.v_proj)]
    for module in fitting:
        module.__class__ = Attention
    return len(fitting)


class FirstTokenLayer(ViTLayer):  # type: ignore[misc]
    """A replacement for the last ViTLayer that computes only the first token."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the first token's state (B, 1, hidden) for states (B, T, hidden)."""
        first, normed = hidden_states[:, :1], self.layernorm_before(hidden_states)
        attended = self.dropout(_attend(self.attention, normed)) + first
        inner = self.dropout(self.mlp(self.layernorm_after(attended)))
        return inner + attended


def _attend(attention: Any, normed: Tensor) -> Tensor:
    """Return the attention output (B, 1, hidden) of the first token of `normed`."""
    query = attention.q_proj(normed[:, :1])
    both = joined_product((attention.k_proj, attention.v_proj), normed)
    return _attended(attention, (query, *both.chunk(2, -1)))


def narrow_to_first_token(model: Any) -> None:
    """Make the last layer compute only the first token, as the head reads no other."""
    layer = model.base_model.layers[-1]
    attention = layer.attention
    plain = type(layer) is ViTLayer and type(attention) is ViTAttention
    if plain and are_matrices(attention.k_proj, attention.v_proj):
        layer.__class__ = FirstTokenLayer
