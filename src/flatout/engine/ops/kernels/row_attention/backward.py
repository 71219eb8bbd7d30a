"""The kernels of the backward pass of row attention, and their operator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.kernels.operators import operator, wrap_triton
from flatout.engine.ops.kernels.row_attention.tiles import (
    TILE,
    constants,
    head_stream,
    is_begun_and_last,
    kept_weights,
    load_tile,
    masked_scores,
    queries_of,
    section_of,
)

FEWEST_PROGRAMS = 8
"""The minimum number of programs per row in the backward pass, so that even a small
batch fills a GPU. It was measured only with 16 query heads and 8 KV heads."""
SECTION = 512
"""The length of a section in tokens. With windowed attention, one program of the
backward pass stores the gradients of one section of a row, and also reads the tokens in
its windows. Without sections, most of the GPU would wait for the longest row."""
LN_2 = tl.constexpr(0.6931471805599453)


def _backward_options(dim: int) -> dict[str, int]:
    """Return launch options for heads of size `dim`. At 128 dimensions, 4 warps have
    too few registers for all sums, and take 0.79 ms instead of 0.71 ms with 8 warps
    (256 rows, 16 query heads, 8 KV heads, H200)."""
    return {"num_warps": 4 if dim <= 64 else 8, "num_stages": 3 if dim <= 64 else 2}


@triton.jit
def _weights_and_grad_scores(
    scores, v, grad, lse, delta, inverse, kept, drops: tl.constexpr
):
    """Return the weights (M, N) after dropout, without the factor 1 / (1 - p), and the
    gradient of the scores (M, N), without their scale."""
    weights = tl.exp2(scores - lse[:, None])
    grad_weights = tl.dot(grad, tl.trans(v))
    dropped = weights
    if drops:
        grad_weights = tl.where(kept, grad_weights * inverse, 0.0)
        dropped = tl.where(kept, weights, 0.0)
    return dropped, weights * (grad_weights - delta[:, None])


@triton.jit
def _add_query_gradient(
    dq, place, sum_ptr, result_ptr, q_token, head, inside, dims, begun, last,
    dim: tl.constexpr, row_stride: tl.constexpr,
):  # fmt: skip
    """Add `dq` (M, D) to the sum over earlier key tiles, which is stored in `sum_ptr`
    at `place`. After the last key tile, store the sum as the gradient."""
    if begun:
        dq += tl.load(sum_ptr + place, mask=inside[:, None], other=0.0)
    if last:
        whole = dq.to(result_ptr.dtype.element_ty)
        out = result_ptr + q_token[:, None] * row_stride
        out += head * dim + dims[None, :]
        tl.store(out, whole, mask=inside[:, None])
    else:
        tl.store(sum_ptr + place, dq, mask=inside[:, None])


@triton.jit
def _backward_kernel(  # noqa: PLR0915
    qkv_ptr, grad_ptr, lse_ptr, delta_ptr, bounds_ptr, seed_ptr,
    result_ptr, apart_ptr, sum_ptr, grad_row, grad_head,
    tokens, span, left, right,
    scale: tl.constexpr, inverse: tl.constexpr, threshold: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, each: tl.constexpr, dim: tl.constexpr,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
    section: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one row, or with windows of one `section` of a row, for
    `each` query heads that share a KV head. The gradient dq of a query tile is summed
    over key tiles in fp32, in the program's own part of `sum_ptr`. Programs that share
    a KV head write dk and dv to `apart_ptr`, which is summed later."""
    keys: tl.constexpr = heads // group
    row_stride: tl.constexpr = (heads + 2 * keys) * dim
    q_ptr, k_ptr = qkv_ptr, qkv_ptr + heads * dim
    v_ptr = k_ptr + keys * dim
    dk_row: tl.constexpr = row_stride if each == group else heads // each * dim
    if each == group:
        dk_ptr = result_ptr + heads * dim
        dv_ptr = dk_ptr + keys * dim
    else:
        dk_ptr, dv_ptr = apart_ptr, apart_ptr + tokens * dk_row
    row, part = tl.program_id(1), tl.program_id(0)
    key = part // (group // each)
    start = tl.load(bounds_ptr + row)
    length = tl.load(bounds_ptr + row + 1) - start
    dims = tl.arange(0, dim)
    head = part
    if drops:
        stream = head_stream(seed_ptr, head)
    own, behind, k_first, k_end = section_of(
        length, left, right, tile, windowed, section
    )
    for k_begin in range(k_first, k_end, tile):
        k_index = k_begin + tl.arange(0, tile)
        k_token = start + k_index
        k_inside = k_index < length
        k = load_tile(k_ptr, k_token, row_stride, key * dim, k_inside, dims)
        v = load_tile(v_ptr, k_token, row_stride, key * dim, k_inside, dims)
        dk = tl.zeros((tile, dim), tl.float32)
        dv = tl.zeros((tile, dim), tl.float32)
        first, end = queries_of(
            k_begin, length, own, behind, left, right, tile, causal, windowed
        )
        if each > 1:  # one loop over all heads
            reach = tl.cdiv(end - first, tile) * tile
            end = first + each * reach
        for step in range(first, end, tile):
            begin = step
            if each > 1:
                member = (step - first) // reach
                begin = step - member * reach
                head = part * each + member
                if drops:
                    stream = head_stream(seed_ptr, head)
            q_index = begin + tl.arange(0, tile)
            q_token = start + q_index
            inside = q_index < length
            q = load_tile(q_ptr, q_token, row_stride, head * dim, inside, dims)
            grad = load_tile(
                grad_ptr, q_token, grad_row, head * grad_head, inside, dims
            )
            lse = tl.load(lse_ptr + head * tokens + q_token, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + head * tokens + q_token, mask=inside, other=0.0)
            scores = masked_scores(
                q, k, q_index, k_index, length, scale, left, right, causal, windowed
            )
            kept = inside[:, None]
            if drops:
                kept = kept_weights(stream, q_token, k_begin, span, threshold, tile)
            dropped, grad_scores = _weights_and_grad_scores(
                scores, v, grad, lse, delta, inverse, kept, drops
            )
            short = grad_scores.to(q.dtype)
            dv += tl.dot(tl.trans(dropped.to(grad.dtype)), grad)
            dk += tl.dot(tl.trans(short), q)
            dq = tl.dot(short, k) * (scale * LN_2)
            place = (q_token[:, None] * heads + head) * dim + dims[None, :]
            begun, last = is_begun_and_last(
                k_begin, begin, length, left, right, tile, causal, windowed
            )
            if windowed:
                inside = inside & (q_index >= own) & (q_index < behind)
            _add_query_gradient(
                dq, place, sum_ptr, result_ptr, q_token, head, inside, dims,
                begun, last, dim, row_stride,
            )  # fmt: skip
        dk = dk * (scale * LN_2)
        dv = dv * inverse
        if windowed:
            k_inside = k_inside & (k_index >= own) & (k_index < behind)
        place = k_token[:, None] * dk_row + part * dim + dims[None, :]
        tl.store(dk_ptr + place, dk.to(dk_ptr.dtype.element_ty), mask=k_inside[:, None])
        tl.store(dv_ptr + place, dv.to(dv_ptr.dtype.element_ty), mask=k_inside[:, None])
        tl.debug_barrier()  # finish the sums before the next key tile reads them


@triton.jit
def _delta_kernel(
    out_ptr, grad_ptr, delta_ptr, g_row, g_head, tokens,
    heads: tl.constexpr, dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Store the sum of output * gradient over D, for a tile of tokens and a head."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    head, dims = tl.program_id(1), tl.arange(0, dim)
    inside = token < tokens
    out = load_tile(out_ptr, token, heads * dim, head * dim, inside, dims)
    grad = load_tile(grad_ptr, token, g_row, head * g_head, inside, dims)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * tokens + token, delta, mask=inside)


@operator("row_attention_backward")
def row_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    bounds: Tensor,
    heads: int,
    max_length: int,
    scale: float,
    dropout: float,
    causal: bool,
    left: int,
    right: int,
) -> Tensor:
    """Return the gradient of `qkv` (P, H + 2 G, D), given the gradient of the output
    (P, H, D). The other arguments are the inputs and outputs of `row_attention`."""
    qkv = qkv.contiguous()
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    tokens, width, dim = qkv.shape
    groups = (width - heads) // 2
    delta = torch.empty_like(lse)
    wrap_triton(_delta_kernel)[(triton.cdiv(tokens, TILE), heads)](
        out, grad, delta, grad.stride(0), grad.stride(1), tokens,
        heads=heads, dim=dim, tile=TILE,
    )  # fmt: skip
    result = torch.empty_like(qkv)
    each = heads_of_a_program(heads, groups)
    parts = heads // each
    apart = qkv.new_empty((2, tokens if parts > groups else 0, parts, dim))
    sums = torch.empty_like(out, dtype=torch.float32)
    windowed = left >= 0
    sections = triton.cdiv(max_length, SECTION) if windowed else 1
    wrap_triton(_backward_kernel)[(parts, bounds.numel() - 1, sections)](
        qkv, grad, lse, delta, bounds, seed,
        result, apart, sums, grad.stride(0), grad.stride(1),
        tokens, max_length, left, right,
        **constants(scale, dropout), heads=heads, group=heads // groups, each=each,
        dim=dim, tile=TILE, causal=causal, windowed=windowed, section=SECTION,
        drops=dropout > 0, **_backward_options(dim),
    )  # fmt: skip
    if parts > groups:  # a KV head's gradient is the sum over its parts
        shared = apart.view(2, tokens, groups, parts // groups, dim).sum(3)
        result[:, heads:].view(tokens, 2, groups, dim).copy_(shared.transpose(0, 1))
    return result


def heads_of_a_program(heads: int, groups: int) -> int:
    """Return how many query heads of a KV head one program of the backward pass
    processes in sequence. This is the largest number that leaves at least
    FEWEST_PROGRAMS programs per row, but at least 1."""
    group = heads // groups
    fitting = [
        n
        for n in range(1, group + 1)
        if group % n == 0 and heads // n >= FEWEST_PROGRAMS
    ]
    return max(fitting, default=1)


@row_attention_backward.register_fake
def _(grad, qkv, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)
