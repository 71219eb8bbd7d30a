"""Last layer of a vision transformer, only for the first token, which the head reads.

Keys and values use all tokens; query, output, norm and feed-forward part only one token
per image. Logits and gradients stay the same.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer

from flatout.engine.families._modeling.vit_blocks import split_heads
from flatout.engine.ops.plain import are_matrices
from flatout.engine.ops.projections import joined_product


class FirstTokenLayer(ViTLayer):  # type: ignore[misc]
    """Replacement for the last layer with the same weights."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """(B, T, hidden) -> (B, 1, hidden)."""
        first, normed = hidden_states[:, :1], self.layernorm_before(hidden_states)
        attended = self.dropout(_attend(self.attention, normed)) + first
        inner = self.dropout(self.mlp(self.layernorm_after(attended)))
        result: Tensor = inner + attended
        return result


def _attend(attention: Any, normed: Tensor) -> Tensor:
    """Attention of the first token (B, 1, hidden) to `normed` (B, T, hidden)."""
    query = attention.q_proj(normed[:, :1])
    both = joined_product((attention.k_proj, attention.v_proj), normed)
    parts = (query, *both.chunk(2, -1))
    q, k, v = (split_heads(part, attention.head_dim) for part in parts)
    dropout = attention.attention_dropout if attention.training else 0.0
    found = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, scale=attention.scaling
    )
    result: Tensor = attention.o_proj(found.transpose(1, 2).flatten(2))
    return result


def narrow_to_first_token(model: Any) -> None:
    """Limit the last layer of a classifier whose head reads only the first token."""
    layer = model.base_model.layers[-1]
    attention = layer.attention
    plain = type(layer) is ViTLayer and type(attention) is ViTAttention
    if plain and are_matrices(attention.k_proj, attention.v_proj):
        layer.__class__ = FirstTokenLayer
