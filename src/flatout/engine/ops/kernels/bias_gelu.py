"""Bias and GELU after a matmul. One backward kernel computes all gradients.

tests/engine/kernel_checks.py compares the kernels with the exact GELU. In the shapes
below, P is the number of tokens and N the number of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.kernels.operators import operator, wrap_triton

ROWS, COLUMNS = 16, 128
"""The size of a tile in tokens and columns."""
PROGRAMS = 1056
"""The number of programs of the backward pass, eight per multiprocessor of an H200.
Four or sixteen per multiprocessor are slower."""
FORWARD_COLUMNS, FORWARD_PROGRAMS = 256, 4224
"""The tile width and the number of programs of the forward pass. More programs and
wider tiles are faster than in the backward pass, because there are no sums (H200)."""


def splits(
    rows: int, columns: int, width: int = COLUMNS, programs: int = PROGRAMS
) -> tuple[int, int]:
    """Return the number of parts into which `rows` rows are divided, and the number of
    rows per part, which is a multiple of ROWS. An empty part is added at the end,
    because the number of parts must never be one (see `operator` in operators.py)."""
    wanted = max(1, programs // triton.cdiv(columns, width))
    each = triton.cdiv(triton.cdiv(max(rows, 1), wanted), ROWS) * ROWS
    return triton.cdiv(max(rows, 1), each) + 1, each


@triton.jit
def _cumulative(x):
    """Return the CDF of the normal distribution at x. The logarithm of its tail is
    nearly a parabola, so a polynomial of degree seven and one exponential are enough.
    The absolute error is at most 2e-6. The relative error in the tail is at most 5e-6,
    which is 1/400 of bf16's rounding error."""
    a = tl.minimum(tl.abs(x), 6.0)
    tail = -1.88962622e-06 * a + 6.26813999e-05
    tail = tail * a - 0.000938867917
    tail = tail * a + 0.00853946153
    tail = tail * a - 0.0540206879
    tail = tail * a - 0.458409786
    tail = tail * a - 1.1512692
    tail = tl.exp2(tail * a - 0.999994338)
    return tl.where(x >= 0, 1.0 - tail, tail)


@triton.jit
def _inside(token, column, tokens, width: tl.constexpr, columns: tl.constexpr):
    """Return a mask (R, C) of the elements inside the tensor. Columns are compared only
    if the width is not a multiple of the tile width. The comparison needs five
    registers, and then only seven instead of eight programs fit on a multiprocessor."""
    inside = (token < tokens)[:, None]
    if width % columns != 0:
        inside = inside & (column < width)[None, :]
    return inside


@triton.jit
def _forward_kernel(
    states_ptr, bias_ptr, out_ptr, tokens, each, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    part = tl.program_id(1)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    for begin in range(part * each, tl.minimum((part + 1) * each, tokens), rows):
        token = begin + tl.arange(0, rows)
        inside = _inside(token, column, tokens, width, columns)
        place = token.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(states_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x += bias[None, :]
        out = (x * _cumulative(x)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr, states_ptr, bias_ptr, out_ptr, sums_ptr, tokens, each,
    width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    part = tl.program_id(1)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((rows, columns), tl.float32)
    for begin in range(part * each, tl.minimum((part + 1) * each, tokens), rows):
        token = begin + tl.arange(0, rows)
        inside = _inside(token, column, tokens, width, columns)
        place = token.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(states_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x += bias[None, :]
        density = tl.exp2(-0.7213475204444817 * x * x) * 0.3989422804014327
        grad *= _cumulative(x) + x * density
        total += grad
        tl.store(out_ptr + place, grad.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptr + part * width + column, tl.sum(total, 0), mask=column < width)


@operator("bias_gelu")
def bias_gelu(states: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(states + bias), with the exact GELU (erf), for `states` (P, N) and
    `bias` (N,). The result has the shape (P, N)."""
    states = states.contiguous()
    tokens, width = states.shape
    out = torch.empty_like(states)
    parts, each = splits(tokens, width, FORWARD_COLUMNS, FORWARD_PROGRAMS)
    wrap_triton(_forward_kernel)[(triton.cdiv(width, FORWARD_COLUMNS), parts)](
        states, bias, out, tokens, each,
        width=width, rows=ROWS, columns=FORWARD_COLUMNS,
    )  # fmt: skip
    return out


@bias_gelu.register_fake
def _(states, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(states, memory_format=torch.contiguous_format)


@operator("bias_gelu_backward")
def _bias_gelu_backward(
    grad: Tensor, states: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the states (P, N) in their dtype, and that of the bias
    (N,) in fp32. `grad` (P, N) is the gradient of the output."""
    states, grad = states.contiguous(), grad.contiguous()
    tokens, width = states.shape
    out = torch.empty_like(states)
    parts, each = splits(tokens, width)
    sums = torch.empty((parts, width), dtype=torch.float32, device=states.device)
    wrap_triton(_backward_kernel)[(triton.cdiv(width, COLUMNS), parts)](
        grad, states, bias, out, sums, tokens, each,
        width=width, rows=ROWS, columns=COLUMNS,
    )  # fmt: skip
    return out, sums.sum(0)


@_bias_gelu_backward.register_fake
def _(grad, states, bias):  # type: ignore[no-untyped-def]
    return (
        torch.empty_like(states, memory_format=torch.contiguous_format),
        torch.empty_like(bias, dtype=torch.float32),
    )


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _bias_gelu_backward(grad, *ctx.saved_tensors)


bias_gelu.register_autograd(_backward, setup_context=_keep)
