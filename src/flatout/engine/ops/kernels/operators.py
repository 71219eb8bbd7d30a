"""Register functions that launch Triton kernels as PyTorch operators, and implement the
dropout hash in Triton. dropout.py implements the same hash in PyTorch.

torch.compile traces into these operators, so that the compiled graph launches the
kernels itself. If the operators were opaque, Python would call each of them. This can
keep the host busy longer than the device: a step of BERT-base with 256 rows took 51 ms,
although an H200 was busy for only 27 ms.
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
    """Return the key for the dropout hash of a layer in one forward pass."""
    return scramble(tl.load(seed_ptr).to(tl.uint32))


@triton.jit
def kept(place, stream, threshold):
    """Return whether dropout keeps the element at offset `place`. The result equals
    that of `dropout.keep_mask` bit for bit."""
    bits = scramble(place.to(tl.uint32) ^ stream)
    return (bits & 0x7FFFFFFF) >= threshold


INTERPRETED = not isinstance(scramble, JITFunction)
"""Whether Triton interprets kernels (TRITON_INTERPRET), which cannot be traced."""


def wrap_triton(kernel: Any) -> Any:
    """Wrap a kernel so that it can be traced. Interpreted kernels are returned
    unchanged, because PyTorch 2.11 rejects them. This function must have the same name
    as PyTorch's, because PyTorch searches for that name in the source of operators."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as the operator `flatout::name`.

    The function must launch its kernels through `wrap_triton`. The kernels must write
    to whole tensors that the function creates, because views would be copied. No helper
    may return a pointer, because PyTorch 2.11 then confuses inputs and outputs. Sizes
    that depend on the number of rows must never be one, or a graph that was compiled
    for many rows fails for few rows.
    """
    register = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    return register(f"flatout::{name}", mutates_args=())
