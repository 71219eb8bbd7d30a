"""The hash that decides about dropout, in Triton (dropout.py has it in PyTorch)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scramble(bits):
    """A hash of 32 bits with small bias (lowbias32, C. Wellons 2018)."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def dropout_stream(seed_ptr):
    """What distinguishes this dropout and this forward pass from others."""
    return scramble(tl.load(seed_ptr).to(tl.uint32))


@triton.jit
def kept(place, stream, threshold):
    """True where the element at `place` survives: `dropout.keep_mask`, bit for bit."""
    bits = scramble(place.to(tl.uint32) ^ stream)
    return (bits & 0x7FFFFFFF) >= threshold
