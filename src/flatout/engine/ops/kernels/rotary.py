"""Apply RMSNorm and rotary embeddings to joined queries, keys and values.

Before attention, decoders apply an RMSNorm to each head (Qwen3) and rotary embeddings
(Su et al. 2021), and concatenate query, key and value again. Inductor's kernels for
these operations, including the sum of gradients over the query heads of a KV head, took
22 of the 185 ms of a training step (24,600 tokens of Qwen3-0.6B's shape, H200).

In the shapes below, P is the number of tokens, H the number of query heads, G the
number of KV heads, and D the head dimension. Each element in the first half of a head
is rotated with the element at the same position in the second half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.kernels.operators import operator, wrap_triton

PROGRAMS = 1584
"""The number of programs of the backward pass, whatever the number of tokens: twelve
per multiprocessor of an H200. Each one sums its weight gradients."""


def _backward_options(places: int) -> dict[str, int]:
    """Return launch options. `places` is the number of values per token, (H + 2 G) * D
    with H + 2 G rounded up to a power of two. For 4,096 values, 2 warps took 0.175 ms
    and 4 warps took 0.193 ms (H200). For 8,192 values, 2 warps spill 492 bytes of
    registers to memory, and 4 warps spill none."""
    return {"num_warps": min(8, max(2, places // 2048))}


@triton.jit
def _forward_kernel(
    product_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, out_ptr,
    heads: tl.constexpr, keys: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
    eps: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    """Process one token. The first and the second halves of its heads are loaded
    separately, each with shape (H + 2 G, D / 2)."""
    token = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, block), tl.arange(0, dim // 2)
    place = (token * (heads + 2 * keys) + head)[:, None] * dim + half[None, :]
    inside = (head < heads + 2 * keys)[:, None]
    turns = (head < heads + keys)[:, None]
    x = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(product_ptr + place + dim // 2, mask=inside, other=0.0).to(tl.float32)
    a, b = x, y
    if norms:
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        rstd = tl.rsqrt(square / dim + eps)[:, None]
        asks = (head < heads)[:, None]
        query, key = tl.load(query_weight_ptr + half), tl.load(key_weight_ptr + half)
        a = x * rstd * tl.where(asks, query[None, :], key[None, :])
        half += dim // 2
        query, key = tl.load(query_weight_ptr + half), tl.load(key_weight_ptr + half)
        b = y * rstd * tl.where(asks, query[None, :], key[None, :])
        half -= dim // 2
    cos = tl.load(cos_ptr + token * dim + half).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * dim + half).to(tl.float32)[None, :]
    x = tl.where(turns, a * cos - b * sin, x).to(out_ptr.dtype.element_ty)
    y = tl.where(turns, b * cos + a * sin, y).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, x, mask=inside)
    tl.store(out_ptr + place + dim // 2, y, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr, product_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr,
    result_ptr, parts_ptr, tokens, each,
    heads: tl.constexpr, keys: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
    eps: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    head, half = tl.arange(0, block), tl.arange(0, dim // 2)
    inside = (head < heads + 2 * keys)[:, None]
    turns = (head < heads + keys)[:, None]
    asks = (head < heads)[:, None]
    answers = turns & (head >= heads)[:, None]
    if norms:
        query, key = tl.load(query_weight_ptr + half), tl.load(key_weight_ptr + half)
        weight_a = tl.where(asks, query[None, :], key[None, :])
        query = tl.load(query_weight_ptr + dim // 2 + half)
        key = tl.load(key_weight_ptr + dim // 2 + half)
        weight_b = tl.where(asks, query[None, :], key[None, :])
        sum_a = tl.zeros((block, dim // 2), tl.float32)
        sum_b = tl.zeros((block, dim // 2), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * each
    for step in range(0, tl.minimum(each, tokens - begin)):
        token = begin + step
        place = (token * (heads + 2 * keys) + head)[:, None] * dim + half[None, :]
        g = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(grad_ptr + place + dim // 2, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * dim + half).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * dim + half).to(tl.float32)[None, :]
        a, b = g * cos + h * sin, h * cos - g * sin
        if norms:
            x = tl.load(product_ptr + place, mask=inside, other=0.0)
            y = tl.load(product_ptr + place + dim // 2, mask=inside, other=0.0)
            x, y = x.to(tl.float32), y.to(tl.float32)
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
            rstd = tl.rsqrt(square / dim + eps)[:, None]
            x, y = x * rstd, y * rstd
            sum_a += a * x
            sum_b += b * y
            a, b = a * weight_a, b * weight_b
            along = ((tl.sum(a * x, 1) + tl.sum(b * y, 1)) / dim)[:, None]
            a, b = (a - x * along) * rstd, (b - y * along) * rstd
        a = tl.where(turns, a, g).to(result_ptr.dtype.element_ty)
        b = tl.where(turns, b, h).to(result_ptr.dtype.element_ty)
        tl.store(result_ptr + place, a, mask=inside)
        tl.store(result_ptr + place + dim // 2, b, mask=inside)
    if norms:
        out = parts_ptr + tl.program_id(0) * 2 * dim + half
        tl.store(out, tl.sum(tl.where(asks, sum_a, 0.0), 0))
        tl.store(out + dim // 2, tl.sum(tl.where(asks, sum_b, 0.0), 0))
        tl.store(out + dim, tl.sum(tl.where(answers, sum_a, 0.0), 0))
        tl.store(out + dim + dim // 2, tl.sum(tl.where(answers, sum_b, 0.0), 0))


@operator("rotary")
def rotary(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    heads: int,
    eps: float,
) -> Tensor:
    """Return `product` (P, H + 2 G, D) after applying norms and rotary embeddings to
    query and key. The value is unchanged. `cos` and `sin` have shape (P, D). The norm
    weights (D,) are None for models without these norms. `heads` is H."""
    product, cos, sin = product.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(product)
    wrap_triton(_forward_kernel)[(product.shape[0],)](
        product, cos, sin, *_pointers(query_weight, key_weight, product), out,
        **_sizes(product, heads), eps=eps, norms=query_weight is not None,
    )  # fmt: skip
    return out


def _pointers(
    query_weight: Tensor | None, key_weight: Tensor | None, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the norm weights, or placeholders that the kernels do not read."""
    if query_weight is None or key_weight is None:
        return other, other
    return query_weight, key_weight


def _sizes(product: Tensor, heads: int) -> dict[str, int]:
    _, width, dim = product.shape
    block = triton.next_power_of_2(width)
    return {"heads": heads, "keys": (width - heads) // 2, "dim": dim, "block": block}


@rotary.register_fake
def _(product, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(product, memory_format=torch.contiguous_format)


@operator("rotary_backward")
def _rotary_backward(
    grad: Tensor,
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the product (P, H + 2 G, D), and the gradients of the two
    norm weights as one fp32 tensor (2, D)."""
    grad, product = grad.contiguous(), product.contiguous()
    tokens, dim, norms = product.shape[0], product.shape[2], query_weight is not None
    parts = torch.empty(
        (PROGRAMS if norms else 0, 2, dim), dtype=torch.float32, device=grad.device
    )
    result, sizes = torch.empty_like(product), _sizes(product, heads)
    wrap_triton(_backward_kernel)[(PROGRAMS,)](
        grad, product, cos.contiguous(), sin.contiguous(),
        *_pointers(query_weight, key_weight, product), result, parts, tokens,
        triton.cdiv(tokens, PROGRAMS), **sizes, eps=eps, norms=norms,
        **_backward_options(sizes["block"] * dim),
    )  # fmt: skip
    return result, parts.sum(0)


@_rotary_backward.register_fake
def _(grad, product, *_):  # type: ignore[no-untyped-def]
    return (
        torch.empty_like(product, memory_format=torch.contiguous_format),
        product.new_empty((2, product.shape[2]), dtype=torch.float32),
    )


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    tensors = ctx.saved_tensors
    result, weights = _rotary_backward(grad, *tensors, ctx.heads, ctx.eps)
    query, key = (None, None) if tensors[3] is None else weights
    return result, None, None, query, key, None, None


rotary.register_autograd(_backward, setup_context=_keep)
