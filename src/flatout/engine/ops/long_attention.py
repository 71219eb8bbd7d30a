"""Attention of long rows laid end to end, by the library's kernel for their lengths.

Rows of the greatest length, which lie in front, are a batch without padding: cuDNN
computes it in kernels made for the GPU at hand, in 0.57 of the time of PyTorch's flash
attention (Dao 2023; 8,192 tokens, H200). All others go to flash attention. How many
there are shows at run time alone, so this is an operator that compiled graphs do not
see into: no length makes them compile anew. Query, key and value are one tensor, and so
is their gradient.

Legend: P tokens, R rows, F full ones, T tokens of a full row, H query heads, G key
heads, D head dimension.
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
    full_rows: Tensor | None,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value side by side (P, H + 2 G, D), H, bounds (R + 1,) int32,
    full_rows (F + 2,), T -> out (P, H, D), log-sum-exp (H P,) fp32, the state of random
    numbers (2,) and () uint64. Window `left`, `right`: -1 unbounded."""
    full = _full(full_rows, longest, dropout, left)
    outs, sums = [], []
    state, unused = _no_state(qkv)
    if full:
        rows = [_by_row(part[:full], longest) for part in _parts(qkv, heads)]
        found = aten._scaled_dot_product_cudnn_attention(
            *rows, None, True, 0.0, causal, False, scale=scale
        )
        outs.append(found[0].transpose(1, 2).flatten(0, 1))
        sums.append(found[1].reshape(-1))
    if full < qkv.shape[0]:
        own = _behind(bounds, full, longest)
        out, lse, state, unused, _ = aten._flash_attention_forward(
            *_parts(qkv[full:], heads), own, own, longest, longest, dropout, causal,
            False, scale=scale, **_sides(causal, left, right),
        )  # fmt: skip
        outs.append(out)
        sums.append(lse.reshape(-1))
    return _whole(outs), _whole(sums), state, unused


def _whole(parts: list[Tensor]) -> Tensor:
    """One behind the other along the first dimension."""
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def _full(full_rows: Tensor | None, longest: int, dropout: float, left: int) -> int:
    """Tokens of full rows, where cuDNN's kernel does what is asked: all of a row,
    without dropout."""
    if full_rows is None or dropout > 0 or left >= 0:
        return 0
    return (full_rows.shape[0] - 2) * longest


def _behind(bounds: Tensor, full: int, longest: int) -> Tensor:
    """Bounds of the rows behind `full` tokens, counted from there."""
    return bounds[full // longest :] - full if full else bounds


def _parts(qkv: Tensor, heads: int) -> list[Tensor]:
    groups = (qkv.shape[1] - heads) // 2
    return list(torch.split(qkv, [heads, groups, groups], 1))


def _by_row(states: Tensor, length: int) -> Tensor:
    """(P, N, D) -> (R, N, T, D), of rows of T tokens."""
    rows = states.shape[0] // length
    return states.view(rows, length, *states.shape[1:]).transpose(1, 2)


def _no_state(qkv: Tensor) -> list[Tensor]:
    shapes: list[list[int]] = [[2], []]
    return [torch.zeros(s, dtype=torch.uint64, device=qkv.device) for s in shapes]


def _sides(causal: bool, left: int, right: int) -> dict[str, int | None]:
    return {
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 or causal else right,
    }


def _unused_seed(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """And offset, of a dropout that there is none of."""
    none = torch.zeros((), dtype=torch.int64, device=qkv.device)
    return none, none


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
    full_rows: Tensor | None,
    heads: int,
    longest: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> Tensor:
    """Gradient (P, H + 2 G, D)."""
    full, grad = _full(full_rows, longest, dropout, left), grad.contiguous()
    result = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    places = _parts(result, heads)
    if full:
        given = (grad, *_parts(qkv, heads), out)
        rows = [_by_row(part[:full], longest) for part in given]
        found = aten._scaled_dot_product_cudnn_attention_backward(
            *rows, lse[: heads * full].view(-1, heads, longest, 1), *_unused_seed(qkv),
            None, None, None, longest, longest, 0.0, causal, scale=scale,
        )  # fmt: skip
        for place, part in zip(places, found, strict=True):
            place[:full].copy_(part.transpose(1, 2).flatten(0, 1))
    if full < qkv.shape[0]:
        own = _behind(bounds, full, longest)
        found = aten._flash_attention_backward(
            grad[full:], *_parts(qkv[full:], heads), out[full:],
            lse[heads * full :].view(heads, -1), own, own, longest, longest, dropout,
            causal, state, unused, scale=scale, **_sides(causal, left, right),
        )  # fmt: skip
        for place, part in zip(places, found, strict=True):
            place[full:].copy_(part)
    return result


@_long_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, heads, bounds, full_rows, *numbers = inputs
    ctx.save_for_backward(qkv, *output, bounds, full_rows)
    ctx.numbers = (heads, *numbers)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradient = _long_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (gradient, *([None] * (2 + len(ctx.numbers))))


long_attention.register_autograd(_backward, setup_context=_keep)
