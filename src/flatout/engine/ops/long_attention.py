"""Attention of long rows laid end to end, by PyTorch's flash kernel (Dao 2023).

Query, key and value are one tensor, as fused blocks hand them on, and so is their
gradient.

Legend: P tokens, R rows, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("flatout::long_attention", mutates_args=())
def long_attention(  # noqa: PLR0913 - operators take tensors and numbers
    qkv: Tensor,
    heads: int,
    bounds: Tensor,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value side by side (P, H + 2 G, D), H, bounds (R + 1,) int32 -> out
    (P, H, D), log-sum-exp (H P,) fp32, the state of random numbers (2,) and () uint64.
    Window `left`, `right`: -1 unbounded."""
    parts = _parts(qkv, heads)
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *parts, bounds, bounds, longest, longest, dropout, causal, False,
        scale=scale, **_sides(causal, left, right),
    )  # fmt: skip
    return out.contiguous(), lse.reshape(-1), state, unused


def _parts(qkv: Tensor, heads: int) -> list[Tensor]:
    groups = (qkv.shape[1] - heads) // 2
    return list(torch.split(qkv, [heads, groups, groups], 1))


def _sides(causal: bool, left: int, right: int) -> dict[str, int | None]:
    return {
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 or causal else right,
    }


@long_attention.register_fake
def _(qkv: Tensor, heads: int, *_numbers: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, _, dim = qkv.shape
    return (
        qkv.new_empty((tokens, heads, dim)),
        qkv.new_empty((heads * tokens,), dtype=torch.float32),
        qkv.new_empty((2,), dtype=torch.uint64),
        qkv.new_empty((), dtype=torch.uint64),
    )


@torch.library.custom_op("flatout::long_attention_backward", mutates_args=())
def _long_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    unused: Tensor,
    bounds: Tensor,
    heads: int,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> Tensor:
    """Gradient (P, H + 2 G, D)."""
    parts, grad = _parts(qkv, heads), grad.contiguous()
    found = aten._flash_attention_backward(
        grad, *parts, out, lse.view(heads, -1), bounds, bounds,
        longest, longest, dropout, causal, state, unused,
        scale=scale, **_sides(causal, left, right),
    )  # fmt: skip
    return torch.cat(found, 1)


@_long_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, heads, bounds, *numbers = inputs
    ctx.save_for_backward(qkv, *output, bounds)
    ctx.numbers = (heads, *numbers)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradient = _long_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (gradient, *([None] * (1 + len(ctx.numbers))))


long_attention.register_autograd(_backward, setup_context=_keep)
