"""Row attention as a differentiable operator, and its forward kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.kernels.operators import operator, wrap_triton
from flatout.engine.ops.kernels.row_attention.backward import row_attention_backward
from flatout.engine.ops.kernels.row_attention.tiles import (
    TILE,
    constants,
    head_stream,
    kept_weights,
    load_tile,
    masked_scores,
    tile_begin,
)

FORWARD = {"num_warps": 4, "num_stages": 3}
"""The launch options, tuned on an H200."""


@triton.jit
def _forward_kernel(
    qkv_ptr, out_ptr, lse_ptr, bounds_ptr, seed_ptr,
    tokens, span, left, right,
    scale: tl.constexpr, inverse: tl.constexpr, threshold: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
    drops: tl.constexpr,
):  # fmt: skip
    keys: tl.constexpr = heads // group
    row_stride: tl.constexpr = (heads + 2 * keys) * dim
    q_ptr, k_ptr = qkv_ptr, qkv_ptr + heads * dim
    v_ptr = k_ptr + keys * dim
    row, block, head = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    start = tl.load(bounds_ptr + row)
    length = tl.load(bounds_ptr + row + 1) - start
    if block * tile >= length:
        return
    q_index = block * tile + tl.arange(0, tile)
    inside = q_index < length
    dims = tl.arange(0, dim)
    q_token = start + q_index
    q = load_tile(q_ptr, q_token, row_stride, head * dim, inside, dims)
    if drops:
        stream = head_stream(seed_ptr, head)
    most = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    result = tl.zeros((tile, dim), tl.float32)
    first, last = 0, length
    if causal:
        last = tl.minimum(length, (block + 1) * tile)
    if windowed:
        first = tile_begin(block * tile - left, tile)
        last = tl.minimum(last, (block + 1) * tile + right)
    for begin in range(first, last, tile):
        k_index = begin + tl.arange(0, tile)
        k_token = start + k_index
        k_inside = k_index < length
        k = load_tile(k_ptr, k_token, row_stride, (head // group) * dim, k_inside, dims)
        v = load_tile(v_ptr, k_token, row_stride, (head // group) * dim, k_inside, dims)
        scores = masked_scores(
            q, k, q_index, k_index, length, scale, left, right, causal, windowed
        )
        new_most = tl.maximum(most, tl.max(scores, 1))
        safe = new_most
        if windowed:  # a tile may be entirely outside a query's window
            safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(most - safe)
        total = total * shrink + tl.sum(weights, 1)
        if drops:
            kept = kept_weights(stream, q_token, begin, span, threshold, tile)
            weights = tl.where(kept, weights, 0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        most = new_most
    total = tl.where(inside, total, 1.0)
    result = result * (inverse / total)[:, None]
    tl.store(
        out_ptr + (q_token[:, None] * heads + head) * dim + dims[None, :],
        result.to(out_ptr.dtype.element_ty), mask=inside[:, None],
    )  # fmt: skip
    tl.store(lse_ptr + head * tokens + q_token, most + tl.log2(total), mask=inside)


@operator("row_attention")
def row_attention(
    qkv: Tensor,
    heads: int,
    bounds: Tensor,
    max_length: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention output (P, H, D), the log2-sum-exp2 of the scores (H, P) in
    fp32, and the dropout seed (1,) in int64.

    `qkv` (P, H + 2 G, D) contains query, key and value in one tensor, so that there is
    only one gradient. Concatenating three gradients took 0.25 ms per layer (69,000
    tokens, 12 heads of size 64, H200). `heads` is H, and `bounds` (R + 1,) int32
    contains the row boundaries. Each token attends to itself, `left` tokens before it
    and `right` tokens after it. There is no window if `left` is -1.
    """
    qkv = qkv.contiguous()
    tokens, width, dim = qkv.shape
    groups = (width - heads) // 2
    out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=qkv.device)
    seed = torch.randint(0, 2**31 - 1, (1,), device=qkv.device)
    tiles = triton.cdiv(max_length, TILE)
    wrap_triton(_forward_kernel)[(heads, tiles, bounds.numel() - 1)](
        qkv, out, lse, bounds, seed,
        tokens, max_length, left, right,
        **constants(scale, dropout), heads=heads, group=heads // groups, dim=dim,
        tile=TILE, causal=causal, windowed=left >= 0, drops=dropout > 0,
        **FORWARD,
    )  # fmt: skip
    return out, lse, seed


@row_attention.register_fake
def _(qkv, heads, bounds, *_):  # type: ignore[no-untyped-def]
    tokens, _, dim = qkv.shape
    return (
        qkv.new_empty((tokens, heads, dim)),
        qkv.new_empty((heads, tokens), dtype=torch.float32),
        qkv.new_empty((1,), dtype=torch.int64),
    )


def _keep_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    qkv, heads, bounds, *numbers = inputs
    ctx.save_for_backward(qkv, *output, bounds)
    ctx.numbers = (heads, *numbers)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    gradient = row_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (gradient, *([None] * (1 + len(ctx.numbers))))


row_attention.register_autograd(_backward, setup_context=_keep_for_backward)
