"""GELU whose error function is a polynomial and one exponential.

Compiled, the library's erf bounds GELU's kernels by arithmetic, not by memory: 0.30
and 0.42 ms forward and backward for 69,000 x 3072 on an H200. Formula 7.1.26 of
Abramowitz and Stegun (1964) is within 1.5e-7 of erf, a hundred-thousandth of bf16's
rounding, and its exponential is the one that the derivative needs as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _normal(states: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative normal distribution, and exp(-x^2 / 2), of fp32 x."""
    # Numbers in place: with dynamic shapes, global ones become inputs of the graph.
    t = 1.0 / (1.0 + 0.2316419 * states.abs())  # 0.3275911 / sqrt(2)
    tail = 1.061405429 * t - 1.453152027
    tail = (tail * t + 1.421413741) * t - 0.284496736
    bell = torch.exp(-0.5 * states * states)
    tail = 0.5 * (tail * t + 0.254829592) * t * bell
    return torch.where(states >= 0, 1.0 - tail, tail), bell


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
        cumulative, bell = _normal(x)
        slope = cumulative + 0.3989422804014327 * x * bell  # 1 / sqrt(2 pi)
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
