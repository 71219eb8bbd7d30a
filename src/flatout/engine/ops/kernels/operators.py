"""Register functions that launch Triton kernels as PyTorch operators, and implement the
dropout hash in Triton (dropout.py implements it in PyTorch).

A compiled graph traces into these operators and launches their kernels itself. Opaque
operators, each called from Python, would keep the host busy longer than the device: a
step of BERT-base with 256 rows took 51 ms, of which an H200 was busy for 27 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def scramble(bits):
    """Hash 32-bit integers with the low-bias function lowbias32 (C. Wellons 2018)."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def dropout_stream(seed_ptr):
    """Return a random stream unique to this dropout layer and forward pass."""
    return scramble(tl.load(seed_ptr).to(tl.uint32))


@triton.jit
def kept(place, stream, threshold):
    """Return whether the element at offset `place` is kept. The result matches
    `dropout.keep_mask` bit for bit."""
    bits = scramble(place.to(tl.uint32) ^ stream)
    return (bits & 0x7FFFFFFF) >= threshold


INTERPRETED = not isinstance(scramble, JITFunction)
"""Whether TRITON_INTERPRET is set. Interpreted kernels cannot be traced."""


def wrap_triton(kernel: Any) -> Any:
    """Wrap a kernel for a compiled graph. This function must have the same name as
    PyTorch's, because PyTorch searches for it in the source of operators. Interpreted
    kernels are returned as they are, because PyTorch 2.11 rejects them."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator `flatout::name`.

    The function must launch its kernels through `wrap_triton` and let them write whole
    tensors that it creates, because a view would be copied. No helper may return a
    pointer, because PyTorch 2.11 then confuses inputs and outputs. Sizes that depend on
    the number of rows must never be one, or a graph for many rows fails for few
    rows."""
    register = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    return register(f"flatout::{name}", mutates_args=())
