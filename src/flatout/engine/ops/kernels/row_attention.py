"""Attention inside rows laid end to end, for rows of tens to hundreds of tokens, and
for windows as narrow in rows of any length.

Flash-attention kernels work in tiles of 128 tokens; the median text has half of that,
and most of such a tile is thrown away. Here tiles are 64 wide, and those that no query
of a tile may look at are left out; a program takes one tile of a row and head forward,
backward a whole row, or a section of one with windows, and query heads that share a
key. Online softmax and recomputation as in FlashAttention-2 (Dao 2023); dropout by
hashing (seed, head, place), again in the backward pass instead of being stored: Philox,
ten rounds a number, cost three times the attention itself on an H200. Scores and sums
are fp32.

Legend: P tokens, R rows, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.kernels.hashing import scramble
from flatout.engine.ops.kernels.operators import operator, wrap_triton

TILE = 64
FEWEST_PROGRAMS = 8
"""Of a row, in the backward pass: with fewer, rows of a small batch would leave a GPU
idle. Measured with 16 query heads on 8 key heads alone."""
SECTION = 512
"""Tokens of a row with windows that a program of the backward pass takes, and what they
see to both sides: of whole rows the longest would keep a GPU waiting."""
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
FORWARD = {"num_warps": 4, "num_stages": 3}
"""Launch options, measured on an H200."""


def _backward_options(dim: int) -> dict[str, int]:
    """At 128 dimensions 4 warps have no registers for all sums: 0.79 ms instead of 0.71
    (256 rows, 16 query heads on 8 key heads, H200)."""
    return {"num_warps": 4 if dim <= 64 else 8, "num_stages": 3 if dim <= 64 else 2}


@triton.jit
def _stream(seed_ptr, head):
    return scramble(tl.load(seed_ptr).to(tl.uint32) + head.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _kept(stream, q_token, begin, span, threshold, tile: tl.constexpr):
    """(M, N) True where a weight is kept, for keys from `begin` on: a function of seed,
    head and place. A hash of 32 bits decides about two keys side by side."""
    k_index = begin + 2 * tl.arange(0, tile // 2)
    place = (q_token[:, None] * span + k_index[None, :]).to(tl.uint32)
    bits = scramble(place ^ stream)
    both = tl.join(bits & 0xFFFF, bits >> 16)  # (M, N / 2, 2)
    return tl.reshape(both, (q_token.shape[0], tile)) >= threshold


@triton.jit
def _scores(
    q, k, q_index, k_index, length, scale, left, right,
    causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """(M, N) in units of log2, -inf where a query may not look. Queries beyond the row
    are not masked: they are zeros, their gradients too, and nobody stores them."""
    beyond = tl.where(k_index < length, 0.0, float("-inf"))
    scores = tl.dot(q, tl.trans(k)) * scale + beyond[None, :]
    if causal:
        scores = tl.where(k_index[None, :] <= q_index[:, None], scores, float("-inf"))
    if windowed:
        distance = k_index[None, :] - q_index[:, None]
        seen = (distance >= -left) & (distance <= right)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _tile_of(index, tile: tl.constexpr):
    """Where the tile of a place begins; that of places before the row is the first."""
    return tl.maximum(index, 0) // tile * tile


@triton.jit
def _tile(ptr, token, row, head, inside, dims):
    """(M, D) of one head, zeros beyond the row."""
    place = token[:, None] * row + head + dims[None, :]
    return tl.load(ptr + place, mask=inside[:, None], other=0.0)


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
    q = _tile(q_ptr, q_token, row_stride, head * dim, inside, dims)
    if drops:
        stream = _stream(seed_ptr, head)
    most = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    result = tl.zeros((tile, dim), tl.float32)
    first, last = 0, length
    if causal:
        last = tl.minimum(length, (block + 1) * tile)
    if windowed:
        first = _tile_of(block * tile - left, tile)
        last = tl.minimum(last, (block + 1) * tile + right)
    for begin in range(first, last, tile):
        k_index = begin + tl.arange(0, tile)
        k_token = start + k_index
        k_inside = k_index < length
        k = _tile(k_ptr, k_token, row_stride, (head // group) * dim, k_inside, dims)
        v = _tile(v_ptr, k_token, row_stride, (head // group) * dim, k_inside, dims)
        scores = _scores(
            q, k, q_index, k_index, length, scale, left, right, causal, windowed
        )
        new_most = tl.maximum(most, tl.max(scores, 1))
        safe = new_most
        if windowed:  # a tile may lie wholly outside of a query's window
            safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(most - safe)
        total = total * shrink + tl.sum(weights, 1)
        if drops:
            kept = _kept(stream, q_token, begin, span, threshold, tile)
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


@triton.jit
def _pair(scores, v, grad, lse, delta, inverse, kept, drops: tl.constexpr):
    """Weights (M, N) after dropout, not yet over 1 - p, and the gradient of the
    scores (M, N) without their scale."""
    weights = tl.exp2(scores - lse[:, None])
    grad_weights = tl.dot(grad, tl.trans(v))
    dropped = weights
    if drops:
        grad_weights = tl.where(kept, grad_weights * inverse, 0.0)
        dropped = tl.where(kept, weights, 0.0)
    return dropped, weights * (grad_weights - delta[:, None])


@triton.jit
def _section_of(
    length, left, right,
    tile: tl.constexpr, windowed: tl.constexpr, section: tl.constexpr,
):  # fmt: skip
    """Begin and end of the tokens whose gradients this program stores, and of the keys
    that take part in them."""
    own, behind = 0, length
    first, end = 0, length
    if windowed:
        own = tl.program_id(2) * section
        behind = tl.minimum(length, own + section)
        first = _tile_of(own - left, tile)
        end = tl.minimum(length, behind + right)
    return own, behind, first, end


@triton.jit
def _queries_of(
    k_begin, length, own, behind, left, right,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """The queries that look at the key tile from `k_begin` on: first, and end. Where it
    lies beside the section from `own` to `behind`, those of the section."""
    first = 0
    if causal:
        first = k_begin
    end = length
    if windowed:
        first = tl.maximum(first, _tile_of(k_begin - right, tile))
        end = tl.minimum(length, k_begin + tile + left)
        beside = (k_begin < own) | (k_begin >= behind)
        first = tl.where(beside, tl.maximum(first, own), first)
        end = tl.where(beside, tl.minimum(end, behind), end)
    return first, end


@triton.jit
def _is_begun_and_last(
    k_begin, begin, length, left, right,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """Whether key tiles before that of `k_begin` have added to the queries' gradient,
    for queries from `begin` on, and whether no later one does."""
    last = k_begin + tile >= length
    begun = k_begin > 0
    if windowed:
        last = k_begin + tile >= tl.minimum(length, begin + tile + right)
        begun = k_begin > _tile_of(begin - left, tile)
    if causal:
        last = k_begin == begin
    return begun, last


@triton.jit
def _grow(
    dq, place, sum_ptr, result_ptr, q_token, head, inside, dims, begun, last,
    dim: tl.constexpr, row_stride: tl.constexpr,
):  # fmt: skip
    """Add `dq` (M, D) to what earlier key tiles left at `place` of `sum_ptr`; after the
    last one the sum is the gradient."""
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
    """All gradients of one row and `each` query heads that share a key; with windows of
    one `section` of the row. dq of a query tile grows from key tile to key tile, in
    fp32 at `sum_ptr`, where only this program reads and writes. Where others share the
    key, dk and dv go to `apart_ptr`."""
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
        stream = _stream(seed_ptr, head)
    own, behind, k_first, k_end = _section_of(
        length, left, right, tile, windowed, section
    )
    for k_begin in range(k_first, k_end, tile):
        k_index = k_begin + tl.arange(0, tile)
        k_token = start + k_index
        k_inside = k_index < length
        k = _tile(k_ptr, k_token, row_stride, key * dim, k_inside, dims)
        v = _tile(v_ptr, k_token, row_stride, key * dim, k_inside, dims)
        dk = tl.zeros((tile, dim), tl.float32)
        dv = tl.zeros((tile, dim), tl.float32)
        first, end = _queries_of(
            k_begin, length, own, behind, left, right, tile, causal, windowed
        )
        if each > 1:  # the heads one after the other, in one loop
            reach = tl.cdiv(end - first, tile) * tile
            end = first + each * reach
        for step in range(first, end, tile):
            begin = step
            if each > 1:
                member = (step - first) // reach
                begin = step - member * reach
                head = part * each + member
                if drops:
                    stream = _stream(seed_ptr, head)
            q_index = begin + tl.arange(0, tile)
            q_token = start + q_index
            inside = q_index < length
            q = _tile(q_ptr, q_token, row_stride, head * dim, inside, dims)
            grad = _tile(grad_ptr, q_token, grad_row, head * grad_head, inside, dims)
            lse = tl.load(lse_ptr + head * tokens + q_token, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + head * tokens + q_token, mask=inside, other=0.0)
            scores = _scores(
                q, k, q_index, k_index, length, scale, left, right, causal, windowed
            )
            kept = inside[:, None]
            if drops:
                kept = _kept(stream, q_token, k_begin, span, threshold, tile)
            dropped, grad_scores = _pair(
                scores, v, grad, lse, delta, inverse, kept, drops
            )
            short = grad_scores.to(q.dtype)
            dv += tl.dot(tl.trans(dropped.to(grad.dtype)), grad)
            dk += tl.dot(tl.trans(short), q)
            dq = tl.dot(short, k) * (scale * LN_2)
            place = (q_token[:, None] * heads + head) * dim + dims[None, :]
            begun, last = _is_begun_and_last(
                k_begin, begin, length, left, right, tile, causal, windowed
            )
            if windowed:
                inside = inside & (q_index >= own) & (q_index < behind)
            _grow(
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
        tl.debug_barrier()  # the sums are there before the next key tile reads them


@triton.jit
def _delta_kernel(
    out_ptr, grad_ptr, delta_ptr, g_row, g_head, tokens,
    heads: tl.constexpr, dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sum over D of output x gradient, for a tile of tokens and one head."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    head, dims = tl.program_id(1), tl.arange(0, dim)
    inside = token < tokens
    out = _tile(out_ptr, token, heads * dim, head * dim, inside, dims)
    grad = _tile(grad_ptr, token, g_row, head * g_head, inside, dims)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * tokens + token, delta, mask=inside)


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
    """Query, key, value side by side (P, H + 2 G, D), H, bounds (R + 1,) int32 ->
    out (P, H, D), log2-sum-exp2 (H, P) fp32, seed (1,) int64. Window `left`, `right`:
    -1 unbounded. One tensor, so that its gradient is one: laying three side by side
    for a fused product took 0.25 ms a layer (69,000 tokens, 12 heads of 64, H200)."""
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
        **_numbers(scale, dropout), heads=heads, group=heads // groups, dim=dim,
        tile=TILE, causal=causal, windowed=left >= 0, drops=dropout > 0,
        **FORWARD,
    )  # fmt: skip
    return out, lse, seed


def _numbers(scale: float, dropout: float) -> dict[str, float]:
    """Constants of the kernels, because a compiled graph hands numbers over as fp64:
    the scale in units of log2, the 16-bit number below which a hash drops, and
    1 / (1 - p) of p rounded to a 65,536th."""
    threshold = round(dropout * 2**16)
    inverse = 2**16 / (2**16 - threshold)
    return {"scale": scale * LOG2_E, "inverse": inverse, "threshold": threshold}


@row_attention.register_fake
def _(qkv, heads, bounds, *_):  # type: ignore[no-untyped-def]
    tokens, _, dim = qkv.shape
    return (
        qkv.new_empty((tokens, heads, dim)),
        qkv.new_empty((heads, tokens), dtype=torch.float32),
        qkv.new_empty((1,), dtype=torch.int64),
    )


@operator("row_attention_backward")
def _row_attention_backward(
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
    """Gradient (P, H + 2 G, D)."""
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
        **_numbers(scale, dropout), heads=heads, group=heads // groups, each=each,
        dim=dim, tile=TILE, causal=causal, windowed=windowed, section=SECTION,
        drops=dropout > 0, **_backward_options(dim),
    )  # fmt: skip
    if parts > groups:  # a key's gradient is the sum over its parts
        shared = apart.view(2, tokens, groups, parts // groups, dim).sum(3)
        result[:, heads:].view(tokens, 2, groups, dim).copy_(shared.transpose(0, 1))
    return result


def heads_of_a_program(heads: int, groups: int) -> int:
    """Query heads, all of one key, that a program of the backward pass takes one after
    the other: as many as leave FEWEST_PROGRAMS a row; else one."""
    group = heads // groups
    fitting = [
        n
        for n in range(1, group + 1)
        if group % n == 0 and heads // n >= FEWEST_PROGRAMS
    ]
    return max(fitting, default=1)


@_row_attention_backward.register_fake
def _(grad, qkv, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    qkv, heads, bounds, *numbers = inputs
    ctx.save_for_backward(qkv, *output, bounds)
    ctx.numbers = (heads, *numbers)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    gradient = _row_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (gradient, *([None] * (1 + len(ctx.numbers))))


row_attention.register_autograd(_backward, setup_context=_keep_for_backward)
