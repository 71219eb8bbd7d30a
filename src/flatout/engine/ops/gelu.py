"""GELU in few instructions.

Compiled, the library's erf bounds GELU's kernels by arithmetic, not by memory: 0.30
and 0.42 ms forward and backward for 69,000 x 3072 on an H200. The logarithm of the
normal distribution's tail is nearly a parabola: seven powers of |x| give the
distribution within 2e-6, and its tail within 5e-6 of itself, a four-hundredth of bf16's
rounding, for one exponential.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _normal(states: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative normal distribution, and its density, of fp32 x."""
    # Numbers in place: with dynamic shapes, global ones become inputs of the graph.
    a = states.abs().clamp(max=6.0)
    tail = -1.88962622e-06 * a + 6.26813999e-05
    tail = tail * a - 0.000938867917
    tail = tail * a + 0.00853946153
    tail = tail * a - 0.0540206879
    tail = tail * a - 0.458409786
    tail = tail * a - 1.1512692
    tail = torch.exp2(tail * a - 0.999994338)
    density = 0.3989422804014327 * torch.exp2(-0.7213475204444817 * states * states)
    return torch.where(states >= 0, 1.0 - tail, tail), density


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        x = states.float()
        result: Tensor = (x * _normal(x)[0]).to(states.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (states,) = ctx.saved_tensors
        x = states.float()
        cumulative, density = _normal(x)
        slope = cumulative + x * density
        result: Tensor = (grad.float() * slope).to(states.dtype)
        return result


class Gelu(nn.Module):
    """In place of transformers' exact GELU."""

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = _Gelu.apply(states)  # type: ignore[no-untyped-call]
        return result


def replace_gelu(model: Any) -> int:
    """Put it in every place of an exact GELU; the number of places."""
    from transformers.activations import GELUActivation

    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (GELUActivation, nn.GELU))
        and getattr(child, "approximate", "none") == "none"
    ]
    for parent, name in places:
        setattr(parent, name, Gelu())
    return len(places)
