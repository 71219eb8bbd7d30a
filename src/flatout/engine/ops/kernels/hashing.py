"""Hash function of dropout, in Triton (dropout.py has it in PyTorch)."""

from __future__ import annotations

import triton
import triton.language as tl


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
