"""Attention of long packed rows by each kernel that can compute it, on a GPU.

    python -m tests.tools.attention_rates
    python -m tests.tools.attention_rates --kernels flash "full rows" FA4 --cases 1,200

Rows lie as a micro-batch has them, the longest in front. Milliseconds of forward and
backward are medians of Triton's `do_bench`, of query, key and value side by side and
one gradient of them; `error` is the relative difference to PyTorch's flash kernel. FA4
is the package flash-attn-4, where it is installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flatout.engine.ops.kernels.row_attention import backward
from flatout.engine.ops.kernels.row_attention.forward import row_attention
from flatout.engine.ops.long_attention import long_attention
from flatout.engine.ops.row_by_row import Rule
from tests.tools.long_rows import SHAPES, lengths_of

aten = torch.ops.aten
CASES = {
    "ModernBERT, window of 129": ("modernbert-1200", 12, 12, 64, (64, 64)),
    "ModernBERT, whole rows": ("modernbert-1200", 12, 12, 64, (-1, -1)),
    "Qwen3, rows of 1,200": ("qwen3-1200", 16, 8, 128, (-1, 0)),
    "Qwen3, rows of 8,192": ("qwen3-8192", 16, 8, 128, (-1, 0)),
    "Qwen3, rows of 97": ("qwen3-96", 16, 8, 128, (-1, 0)),
    "BERT, rows of 97": ("bert-97", 12, 12, 64, (-1, -1)),
}
Attend = Callable[[Tensor, int, Tensor, int, Rule], Tensor]


def flash(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    """Of all rows."""
    out: Tensor = long_attention(qkv, heads, bounds, None, longest, *rule, False)[0]
    return out


def full(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    """Full rows by cuDNN, the others by flash."""
    count = int((bounds.diff() == longest).sum()) + 2
    mark = torch.empty(count, dtype=torch.uint8, device="cuda")
    given = (qkv, heads, bounds, mark, longest, *rule, False)
    out: Tensor = long_attention(*given)[0]
    return out


def flash4(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    given = (qkv, heads, bounds, None, longest, *rule, True)
    out: Tensor = long_attention(*given)[0]
    return out


def batch(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    """PyTorch's own choice for a batch without padding; rows must all be full."""
    groups = (qkv.shape[1] - heads) // 2
    rows = qkv.view(-1, longest, *qkv.shape[1:]).transpose(1, 2)
    query, key, value = rows.split([heads, groups, groups], 1)
    out = scaled_dot_product_attention(
        query, key, value, is_causal=rule.causal, scale=rule.scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def tiles(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    out: Tensor = row_attention(qkv, heads, bounds, longest, *rule)[0]
    return out


class CudnnRows(torch.autograd.Function):
    """cuDNN's kernel for rows of any lengths, which PyTorch does not call by itself."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *numbers: Any
    ) -> Tensor:
        longest, rule = numbers
        found = aten._cudnn_attention_forward(
            q, k, v, None, bounds, bounds, longest, longest, True, 0.0, rule.causal,
            False, scale=rule.scale,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, found[0], found[1], found[6], found[7], bounds)
        ctx.numbers = numbers
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, bounds = ctx.saved_tensors
        longest, rule = ctx.numbers
        found = aten._cudnn_attention_backward(
            grad.contiguous(), *saved, None, bounds, bounds, longest, longest, 0.0,
            rule.causal, scale=rule.scale,
        )  # fmt: skip
        return (*found, None, None, None)


def cudnn(qkv: Tensor, heads: int, bounds: Tensor, longest: int, rule: Rule) -> Tensor:
    groups = (qkv.shape[1] - heads) // 2
    parts = [part.contiguous() for part in qkv.split([heads, groups, groups], 1)]
    out: Tensor = CudnnRows.apply(*parts, bounds, longest, rule)  # type: ignore[no-untyped-call]
    return out


WHOLE = "tiles, whole rows"
"""Without sections of rows with windows, in the backward pass."""
KERNELS: dict[str, Attend] = {
    "flash": flash,
    "full rows": full,
    "a batch": batch,
    "tiles of 64": tiles,
    WHOLE: tiles,
    "cuDNN, rows": cudnn,
    "FA4": flash4,
}


def measured(attend: Attend, qkv: Tensor, given: tuple[Any, ...]) -> dict[str, Any]:
    out = attend(qkv, *given)
    grad = torch.linspace(-1, 1, out.numel(), device="cuda").to(out.dtype)
    grad = grad.view(out.shape)
    (gradient,) = torch.autograd.grad(out, qkv, grad)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    again = attend(qkv, *given)
    host_ms = 1e3 * (time.perf_counter() - begin)
    forward_ms = triton.testing.do_bench(
        lambda: attend(qkv, *given), 50, 150, return_mode="median"
    )
    backward_ms = triton.testing.do_bench(
        lambda: torch.autograd.grad(again, qkv, grad, retain_graph=True),
        50, 200, return_mode="median",
    )  # fmt: skip
    return {
        "out": out.detach(),
        "gradient": gradient,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "host_ms": host_ms,
    }


def error(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def compare(name: str, wanted: list[str]) -> None:
    shape_name, heads, groups, dim, window = CASES[name]
    shape = SHAPES[shape_name]
    lengths = np.sort(lengths_of(shape, shape.batch))[::-1]
    torch.manual_seed(0)
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
    total, causal = int(lengths.sum()), shape.causal
    qkv = torch.randn(total, heads + 2 * groups, dim, device="cuda")
    qkv = qkv.to(torch.bfloat16).requires_grad_()
    rule = Rule(dim**-0.5, 0.0, causal, *window)
    given = (heads, bounds.cuda(), shape.longest, rule)
    chosen = {name: KERNELS[name] for name in KERNELS if name in wanted}
    if window[0] >= 0:
        chosen.pop("cuDNN, rows", None)  # it knows no windows
    else:
        chosen.pop(WHOLE, None)
    right = None
    for kernel, attend in chosen.items():
        section = 2**20 if kernel == WHOLE else backward.SECTION
        try:
            with patch.object(backward, "SECTION", section):
                found = measured(attend, qkv, given)
        except Exception as fault:
            text = f"{type(fault).__name__}: {fault}".split("\n")[0][:150]
            print(f"| {name} | {kernel} | {text} |", flush=True)  # noqa: T201
            continue
        right = right or found
        errors = [error(found[n], right[n]) for n in ("out", "gradient")]
        figures = [f"{found[n]:.3f}" for n in ("forward_ms", "backward_ms", "host_ms")]
        figures += [f"{value:.1e}" for value in errors]
        print(f"| {name} | {kernel} | {' | '.join(figures)} |", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], default=[*KERNELS])
    parser.add_argument("--cases", default="", help="a part of their names")
    asked = parser.parse_args()
    print("| attention | kernel | forward ms | backward ms | host ms | error | |")  # noqa: T201
    for name in CASES:
        if asked.cases in name:
            compare(name, asked.kernels)


if __name__ == "__main__":
    main()
