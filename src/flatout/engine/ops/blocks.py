"""Fused output blocks for BERT.

Bias, dropout, residual and LayerNorm after a matmul are memory-bound. One kernel
computes the result and another the gradients (kernels/residual_norm.py)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engine.ops.dropout import HashDropout, Noise
from flatout.engine.ops.plain import are_matrices, is_alone, is_plain

MAX_WIDTH = 1024
"""The largest hidden size for which a token's state fits in the registers of a warp."""


class _Carry:
    """Stores the tensor that routes the gradient of a block's residual input to the
    block that computed this input (see `residual_norm`)."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def take(self) -> Tensor | None:
        tensor, self.tensor = self.tensor, None
        return tensor

    def begin(self, encoder: nn.Module, states: tuple[Tensor, ...]) -> None:
        """Hook that stores a carry for the encoder's input `states` (B, T, N), so that
        the first layer shares the compiled graph of all other layers."""
        from flatout.engine.ops.kernels.residual_norm import first_carry

        if encoder.training:
            self.tensor = first_carry(states[0].flatten(0, -2))


class _Output(nn.Module):
    """A linear layer followed by dropout, residual and LayerNorm. In the backward pass,
    a block with `takes` sends the gradient of its residual input directly to the
    previous block. A block with `gives` receives this gradient from the next block and
    adds it to the gradient of its own output."""

    dense: nn.Linear
    dropout: nn.Module
    LayerNorm: nn.LayerNorm
    noise: Noise
    carry: _Carry
    takes: bool
    gives: bool

    def forget(self) -> None:
        """Drop the carry of a failed pass, which would keep activations in memory."""
        self.carry.take()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        if not self.training:
            states = self.dense(hidden_states) + input_tensor
            return self.LayerNorm(states)
        return self._fused(F.linear(hidden_states, self.dense.weight), input_tensor)

    def _fused(self, product: Tensor, residual: Tensor) -> Tensor:
        from flatout.engine.ops.kernels.residual_norm import residual_norm

        seed, rate = self.noise.seed, 0.0
        if isinstance(self.dropout, HashDropout):
            seed, rate = self.dropout.seed, self.dropout.p
        carried = self.carry.take()
        carried = carried if self.takes else None
        out, carry, *_ = residual_norm(
            product.flatten(0, -2),
            self.dense.bias,
            (residual if carried is None else residual.detach()).flatten(0, -2),
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            carried,
            seed,
            rate,
            self.LayerNorm.eps,
        )
        if self.gives:
            self.carry.tensor = carry
        return out.view(product.shape)


def fuse_blocks(model: Any, noise: Noise) -> int:
    """Replace the output blocks of BERT-like layers with fused blocks. Return the
    number of layers, or 0 if they cannot be fused. `replace_dropout` and
    `narrow_last_layer` must be called before this function."""
    layers = model.base_model.encoder.layer
    outputs = [
        out for layer in layers for out in (layer.attention.output, layer.output)
    ]
    # The kernel limits the width, and blocks must run one after another.
    others = ("chunk_size_feed_forward", "add_cross_attention")
    fits = model.config.hidden_size <= MAX_WIDTH and not any(
        getattr(model.config, name, None) for name in others
    )
    if not fits or not all(map(_is_usual, outputs)):
        return 0
    carry = _Carry()
    for module in outputs:
        module.__class__ = _Output
        module.noise, module.carry = noise, carry
        # A narrowed residual contains only targets, so it is not a block's output.
        module.takes = not hasattr(module, "target_index")
        module.gives = module is not outputs[-1]
    model.base_model.encoder.register_forward_pre_hook(carry.begin)
    return len(layers)


def _is_usual(output: Any) -> bool:
    """Return whether an output block is unchanged. Otherwise, no block can be fused,
    because each one exchanges gradients with the next."""
    inner = is_alone(output.LayerNorm) and are_matrices(output.dense)
    dropout = output.dropout
    none = type(dropout) is nn.Dropout and is_alone(dropout) and not dropout.p
    drops = none or isinstance(dropout, HashDropout)
    usual = is_plain(output) and inner and drops
    return usual and type(output.LayerNorm) is nn.LayerNorm
