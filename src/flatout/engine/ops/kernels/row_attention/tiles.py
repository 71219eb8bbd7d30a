"""Operations on tiles for both passes (loading, scores, dropout), and functions that
determine which tiles interact in the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.engine.ops.kernels.operators import scramble

TILE = 64
LOG2_E = 1.4426950408889634


def constants(scale: float, dropout: float) -> dict[str, float]:
    """Return the kernels' constants: the scale of the scores in units of log2, the
    threshold for 16 bits of a hash, below which dropout drops a weight, and the factor
    1 / (1 - p). p is rounded to a multiple of 1 / 65,536. They are constants because a
    compiled graph would pass numbers as fp64."""
    threshold = round(dropout * 2**16)
    inverse = 2**16 / (2**16 - threshold)
    return {"scale": scale * LOG2_E, "inverse": inverse, "threshold": threshold}


@triton.jit
def head_stream(seed_ptr, head):
    """Return the key for the dropout hash of a head in one forward pass."""
    return scramble(tl.load(seed_ptr).to(tl.uint32) + head.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def kept_weights(stream, q_token, begin, span, threshold, tile: tl.constexpr):
    """Return a mask (M, N) of the weights that dropout keeps. The queries are `q_token`
    (M,), and the keys are the tile that begins at `begin`. The mask depends on the
    seed, head and indices. One 32-bit hash serves two adjacent keys."""
    k_index = begin + 2 * tl.arange(0, tile // 2)
    place = (q_token[:, None] * span + k_index[None, :]).to(tl.uint32)
    bits = scramble(place ^ stream)
    both = tl.join(bits & 0xFFFF, bits >> 16)  # (M, N / 2, 2)
    return tl.reshape(both, (q_token.shape[0], tile)) >= threshold


@triton.jit
def masked_scores(
    q, k, q_index, k_index, length, scale, left, right,
    causal: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """Return scores (M, N) in units of log2, with -inf for masked keys. Queries beyond
    the end of the row are not masked, because they are never stored."""
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
def tile_begin(index, tile: tl.constexpr):
    """Return the start of the tile that contains `index`, or 0 for a negative index."""
    return tl.maximum(index, 0) // tile * tile


@triton.jit
def load_tile(ptr, token, row, head, inside, dims):
    """Load the values of one head for a tile of tokens, as (M, D). Tokens that are not
    `inside` the row are zeros."""
    place = token[:, None] * row + head + dims[None, :]
    return tl.load(ptr + place, mask=inside[:, None], other=0.0)


@triton.jit
def section_of(
    length, left, right,
    tile: tl.constexpr, windowed: tl.constexpr, section: tl.constexpr,
):  # fmt: skip
    """Return the start and end of the tokens whose gradients this program stores, and
    the start and end of the keys that it reads for this purpose."""
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
    """Return the start and end of the queries that attend to the key tile at `k_begin`.
    If this tile is outside the program's section (`own` to `behind`), only queries in
    the section are included."""
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
    """Return two booleans about the gradient of the queries at `begin`, which is a sum
    over key tiles: whether tiles before the one at `k_begin` have been added, and
    whether the tile at `k_begin` is the last one."""
    last = k_begin + tile >= length
    begun = k_begin > 0
    if windowed:
        last = k_begin + tile >= tl.minimum(length, begin + tile + right)
        begun = k_begin > tile_begin(begin - left, tile)
    if causal:
        last = k_begin == begin
    return begun, last
