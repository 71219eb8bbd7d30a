"""Tiles that interact in the backward pass of row attention."""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.engine.ops.kernels.row_attention.tiles import tile_begin


@triton.jit
def section_of(
    length, left, right,
    tile: tl.constexpr, windowed: tl.constexpr, section: tl.constexpr,
):  # fmt: skip
    """Begin and end of the tokens whose gradients this program stores, and of the keys
    that contribute to them."""
    own, behind = 0, length
    first, end = 0, length
    if windowed:
        own = tl.program_id(2) * section
        behind = tl.minimum(length, own + section)
        first = tile_begin(own - left, tile)
        end = tl.minimum(length, behind + right)
    return own, behind, first, end


@triton.jit
def queries_of(
    k_begin, length, own, behind, left, right,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """First and end of the queries that attend to the key tile from `k_begin` on. If it
    is outside of the section from `own` to `behind`, only queries of the section."""
    first = 0
    if causal:
        first = k_begin
    end = length
    if windowed:
        first = tl.maximum(first, tile_begin(k_begin - right, tile))
        end = tl.minimum(length, k_begin + tile + left)
        beside = (k_begin < own) | (k_begin >= behind)
        first = tl.where(beside, tl.maximum(first, own), first)
        end = tl.where(beside, tl.minimum(end, behind), end)
    return first, end


@triton.jit
def is_begun_and_last(
    k_begin, begin, length, left, right,
    tile: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """Return whether earlier key tiles than that of `k_begin` have added to the
    gradient of the queries from `begin` on, and whether this tile is the last one."""
    last = k_begin + tile >= length
    begun = k_begin > 0
    if windowed:
        last = k_begin + tile >= tl.minimum(length, begin + tile + right)
        begun = k_begin > tile_begin(begin - left, tile)
    if causal:
        last = k_begin == begin
    return begun, last
