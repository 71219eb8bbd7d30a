"""Registration of functions that launch Triton kernels as operators, and the hash of
dropout in Triton (dropout.py has it in PyTorch).

A compiled graph traces into them and launches the kernels itself. As opaque operators,
each called from Python, they occupied the host longer than the device: BERT-base at
global batch 256 needed 51 ms per step, of which an H200 worked 27.
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
    """32-bit hash with small bias (lowbias32, C. Wellons 2018)."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def dropout_stream(seed_ptr):
    """Stream of this dropout in this forward pass, different from all others."""
    return scramble(tl.load(seed_ptr).to(tl.uint32))


@triton.jit
def kept(place, stream, threshold):
    """True if the element at `place` is kept: `dropout.keep_mask`, bit for bit."""
    bits = scramble(place.to(tl.uint32) ^ stream)
    return (bits & 0x7FFFFFFF) >= threshold


INTERPRETED = not isinstance(scramble, JITFunction)
"""Interpreted kernels (TRITON_INTERPRET) cannot be traced."""


def wrap_triton(kernel: Any) -> Any:
    """Wrap a kernel for a compiled graph. The name is the same as PyTorch's, which
    searches operators' source for it; PyTorch 2.11 refuses interpreted kernels."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register `flatout::name`. Its kernels are launched through `wrap_triton`, and
    write whole tensors that were made there: a view would be copied. If a helper
    returns a pointer, PyTorch 2.11 confuses inputs and outputs. Sizes that depend on
    the number of rows are never one: a graph for many rows would not work for few."""
    register = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    return register(f"flatout::{name}", mutates_args=())
