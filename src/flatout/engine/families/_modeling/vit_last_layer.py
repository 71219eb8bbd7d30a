"""The last layer of a vision transformer, for what its head reads: the first token.

Keys and values come from all tokens; query, output, norm and feed-forward part are
those of one token an image. Logits and gradients stay the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.vit.modeling_vit import ViTLayer


class _Own(nn.Linear):
    """No part of a product with others: its input is another."""


class FirstTokenLayer(ViTLayer):  # type: ignore[misc]
    """In place of the last layer, with its weights."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """(B, T, hidden) -> (B, 1, hidden)."""
        first, normed = hidden_states[:, :1], self.layernorm_before(hidden_states)
        attended = self.dropout(_attend(self.attention, normed)) + first
        inner = self.dropout(self.mlp(self.layernorm_after(attended)))
        result: Tensor = inner + attended
        return result


def _attend(attention: Any, normed: Tensor) -> Tensor:
    """The first token's (B, 1, hidden) to all of `normed` (B, T, hidden)."""
    query = attention.q_proj(normed[:, :1])
    key_value = attention.k_proj, attention.v_proj
    weights = torch.cat([layer.weight for layer in key_value])
    biases = [layer.bias for layer in key_value if layer.bias is not None]
    both = F.linear(normed, weights, torch.cat(biases) if biases else None)
    q, k, v = (_heads(part, attention) for part in (query, *both.chunk(2, -1)))
    dropout = attention.attention_dropout if attention.training else 0.0
    found = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, scale=attention.scaling
    )
    result: Tensor = attention.o_proj(found.transpose(1, 2).flatten(2))
    return result


def _heads(states: Tensor, attention: Any) -> Tensor:
    """(B, T, H D) -> (B, H, T, D)."""
    shape = (*states.shape[:2], -1, attention.head_dim)
    return states.view(shape).transpose(1, 2)


def narrow_to_first_token(model: Any) -> None:
    """Of a classifier, whose head takes the first token."""
    layer = model.base_model.layers[-1]
    layer.__class__ = FirstTokenLayer
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.attention, name).__class__ = _Own
