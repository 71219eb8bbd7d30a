"""Attention of long rows laid end to end, by PyTorch's kernels for their lengths.

Rows of the greatest length, which lie in front, are a batch without padding: cuDNN has
kernels made for the GPU at hand, which take 0.57 of the time of PyTorch's flash
attention (Dao 2023; 8,192 tokens, H200). All others go to flash attention. How many are
full shows at run time alone, so this is an operator that compiled graphs do not see
into: no length makes them compile anew. Query, key and value are one tensor, as fused
blocks hand them on, and so is their gradient.

Legend: P tokens, R rows, F full ones, T tokens of a full row, H query heads, G key
heads, D head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.engine.ops.kernels import flash4 as kernels
from flatout.engine.ops.kernels.flash4 import Seen
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)
aten = torch.ops.aten


class _Cudnn:
    """What its kernels have shown in this process."""

    refused = False
    sums_dims = 4
    """Of a forward pass's log-sum-exp: versions of PyTorch differ."""


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
    flash4: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value side by side (P, H + 2 G, D), H, bounds (R + 1,) int32,
    full_rows (F + 2,) as in rows/layout.py, T -> out (P, H, D), log-sum-exp (H P,)
    fp32, the state of random numbers (2,) and () uint64. Window `left`, `right`: -1
    unbounded. `flash4`: FlashAttention 4 takes all rows, without dropout."""
    if flash4:
        seen = Seen(bounds, longest, scale, causal, **_sides(causal, left, right))
        out, lse = kernels.forward(_parts(qkv, heads), seen)
        state, unused = _no_state(qkv)
        return out, lse.reshape(-1), state, unused
    full = _full_tokens(full_rows, longest, dropout, left)
    front = _tried(_full_forward, qkv[:full], heads, longest, scale, causal)
    found, full = ([front], full) if front else ([], 0)
    state, unused = _no_state(qkv)
    if full < len(qkv):
        own = _behind(bounds, full, longest)
        out, lse, state, unused, _ = aten._flash_attention_forward(
            *_parts(qkv[full:], heads), own, own, longest, longest, dropout, causal,
            False, scale=scale, **_sides(causal, left, right),
        )  # fmt: skip
        found.append((out, lse.reshape(heads, -1)))
    outs, sums = zip(*found, strict=True)
    return _whole(outs, 0), _whole(sums, 1).view(-1), state, unused


def _full_tokens(
    full_rows: Tensor | None, longest: int, dropout: float, left: int
) -> int:
    """Of full rows, where cuDNN's kernels do what is asked: all of a row, without
    dropout, and not the same bits each time."""
    fixed = torch.are_deterministic_algorithms_enabled()
    if full_rows is None or dropout > 0 or left >= 0 or fixed or _Cudnn.refused:
        return 0
    return (full_rows.shape[0] - 2) * longest


def _tried(work: Callable[..., Any], states: Tensor, *given: Any) -> Any:
    """What cuDNN gives for `states` (full, ...); None where there are none, and where
    it refuses: from then on flash attention takes all rows."""
    if not len(states):
        return None
    try:
        return work(states, *given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _Cudnn.refused = True
        reason = first_line(error)
        logger.warning("cuDNN's attention refuses full rows (%s): by flash", reason)
        return None


def _full_forward(
    qkv: Tensor, heads: int, longest: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Of F T tokens -> out (F T, H, D), log-sum-exp (H, F T)."""
    rows = [_by_row(part, longest) for part in _parts(qkv, heads)]
    out, sums, *_ = aten._scaled_dot_product_cudnn_attention(
        *rows, None, True, 0.0, causal, False, scale=scale
    )
    _Cudnn.sums_dims = sums.dim()
    sums = sums.reshape(-1, heads, longest).transpose(0, 1)
    return _end_to_end(out), sums.reshape(heads, -1)


def _full_backward(
    qkv: Tensor, grad: Tensor, out: Tensor, sums: Tensor, *numbers: Any
) -> list[Tensor]:
    """Gradients of query, key and value of F T tokens, (F T, H or G, D); `sums`:
    log-sum-exp (H, F T)."""
    longest, scale, causal = numbers
    heads, device = len(sums), qkv.device
    rows = [_by_row(t, longest) for t in (grad, *_parts(qkv, heads), out)]
    sums = sums.view(heads, -1, longest).transpose(0, 1).contiguous()
    sums = sums.view(*sums.shape, *[1] * (_Cudnn.sums_dims - 3))
    seed = torch.zeros((), dtype=torch.int64, device=device)  # of no dropout
    found = aten._scaled_dot_product_cudnn_attention_backward(
        *rows, sums, seed, seed, None, None, None, longest, longest, 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return [_end_to_end(part) for part in found]


def _by_row(states: Tensor, length: int) -> Tensor:
    """(F T, N, D) -> (F, N, T, D)."""
    return states.view(-1, length, *states.shape[1:]).transpose(1, 2)


def _end_to_end(states: Tensor) -> Tensor:
    """And back."""
    return states.transpose(1, 2).flatten(0, 1)


def _whole(parts: Sequence[Tensor], dim: int) -> Tensor:
    """One behind the other."""
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()


def _behind(bounds: Tensor, full: int, longest: int) -> Tensor:
    """Bounds of the rows behind `full` tokens, counted from there."""
    return bounds[full // longest :] - full if full else bounds


def _parts(qkv: Tensor, heads: int) -> list[Tensor]:
    groups = (qkv.shape[1] - heads) // 2
    return list(torch.split(qkv, [heads, groups, groups], 1))


def _no_state(qkv: Tensor) -> list[Tensor]:
    shapes: list[list[int]] = [[2], []]
    return [qkv.new_empty(shape, dtype=torch.uint64) for shape in shapes]


def _sides(causal: bool, left: int, right: int) -> dict[str, int | None]:
    return {
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 or causal else right,
    }


@long_attention.register_fake
def _(qkv: Tensor, heads: int, *_numbers: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, _, dim = qkv.shape
    state, unused = _no_state(qkv)
    sums = qkv.new_empty((heads * tokens,), dtype=torch.float32)
    return qkv.new_empty((tokens, heads, dim)), sums, state, unused


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
    flash4: bool,
) -> Tensor:
    """Gradient (P, H + 2 G, D). Of cuDNN's kernels and flash attention either takes
    what the other's forward pass left."""
    grad, lse = grad.contiguous(), lse.view(heads, -1)
    result = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if flash4:
        seen = Seen(bounds, longest, scale, causal, **_sides(causal, left, right))
        parts = _parts(qkv, heads)
        kernels.backward(grad, parts, out, lse, seen, _parts(result, heads))
        return result
    full = _full_tokens(full_rows, longest, dropout, left)
    front = (qkv[:full], grad[:full], out[:full], lse[:, :full])
    parts = _tried(_full_backward, *front, longest, scale, causal)
    full = full if parts else 0
    if full == len(qkv):
        return torch.cat(parts, 1, out=result)
    own = _behind(bounds, full, longest)
    found = aten._flash_attention_backward(
        grad[full:], *_parts(qkv[full:], heads), out[full:], lse[:, full:].contiguous(),
        own, own, longest, longest, dropout, causal, state, unused,
        scale=scale, **_sides(causal, left, right),
    )  # fmt: skip
    if full:
        torch.cat(parts, 1, out=result[:full])
    torch.cat(found, 1, out=result[full:])
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
