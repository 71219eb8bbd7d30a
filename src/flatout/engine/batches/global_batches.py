"""Choose the rows of each global batch, and split them into micro-batches.

All functions are pure functions of row numbers and lengths. The rows of a step depend
only on the seed, the epoch, the step and the number of rows. The split into ranks and
micro-batches affects the speed and the memory use, but never the gradient.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flatout.engine.parameters import Strategy
from flatout.engine.rows.layout import Ints

FEISTEL_ROUNDS = 8
BLOCK = 4096
"""The number of positions to permute per call. 13 positions take as long as 1,000."""


@dataclass(frozen=True)
class GlobalBatches:
    """The sequence of global batches, which depends only on the fields below. Each
    epoch is a pseudo-random permutation of the rows (a Feistel network with cycle
    walking, Black & Rogaway 2002), whose elements are computed when they are needed.
    The last batch of an epoch contains the remaining rows."""

    num_rows: int
    batch_size: int
    seed: int
    skipped: tuple[int, ...] = ()
    """Row numbers to leave out. Only the batches that contain them become smaller."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def total_steps(self, epochs: float, max_steps: int | None = None) -> int:
        """Return `max_steps` if given, else the number of steps in `epochs`, rounded
        up."""
        if max_steps is not None:
            return max_steps
        return math.ceil(epochs * self.steps_per_epoch - 1e-9)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> Ints:
        """Return the row numbers (N,) of `step`, which is counted over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.num_rows)
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        found = [_block(n, self.num_rows, self.seed, epoch) for n in blocks]
        first = blocks.start * BLOCK
        rows = np.concatenate(found)[start - first : stop - first]
        if not self.skipped:
            return rows
        places = np.searchsorted(self._sorted, rows).clip(max=len(self._sorted) - 1)
        return rows[self._sorted[places] != rows]

    @cached_property
    def _sorted(self) -> Ints:
        return np.unique(np.array(self.skipped, dtype=np.int64))

    def steps_of(self, rows: Ints, epoch: int) -> Ints:
        """Return the steps (N,) of `epoch` whose positions belong to `rows` (N,). Rows
        in `skipped` also have a step, although its batch does not contain them."""
        positions = unpermute(rows, self.num_rows, self.seed, epoch)
        return epoch * self.steps_per_epoch + positions // self.batch_size


@lru_cache(maxsize=2)
def _block(number: int, size: int, seed: int, epoch: int) -> Ints:
    """Return the row numbers of one block of an epoch, cached for small batches."""
    begin = number * BLOCK
    return permute(np.arange(begin, min(begin + BLOCK, size)), size, seed, epoch)


def permute(positions: Ints, size: int, seed: int, epoch: int) -> Ints:
    """Apply a pseudo-random permutation of `range(size)` to `positions` (N,)."""
    return _walk(positions, size, seed, epoch, inverse=False)


def unpermute(images: Ints, size: int, seed: int, epoch: int) -> Ints:
    """Apply the inverse of `permute` to `images` (N,)."""
    return _walk(images, size, seed, epoch, inverse=True)


Numbers = npt.NDArray[np.uint64]


def _walk(numbers: Ints, size: int, seed: int, epoch: int, *, inverse: bool) -> Ints:
    """Apply the network to each of `numbers` (N,), and repeat this for results that are
    not below `size` (cycle walking)."""
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    sequence = np.random.SeedSequence([seed, epoch])
    keys = sequence.generate_state(FEISTEL_ROUNDS, np.uint64).astype(np.uint64)
    images = numbers.astype(np.uint64)
    outside = np.ones(len(images), dtype=bool)
    while outside.any():  # on average under four times, as the domain is < 4 * size
        images[outside] = _feistel(images[outside], half_bits, keys, inverse)
        outside = images >= size
    return images.astype(np.int64)


def _feistel(values: Numbers, half_bits: int, keys: Numbers, inverse: bool) -> Numbers:
    """Apply a keyed bijection to `values` (N,), numbers with `2 * half_bits` bits. Its
    inverse is the same network with the halves swapped and the keys reversed."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    if inverse:
        left, right, keys = right, left, keys[::-1]
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    if inverse:
        left, right = right, left
    return (left << shift) | right


def _mix(values: Numbers) -> Numbers:
    """Apply the finaliser of splitmix64 (Steele, Lea & Flood 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


Plan = tuple[tuple[Ints, ...], ...]
"""The micro-batches of one global batch. `plan[rank][k]` contains positions (B,) in the
global batch. All ranks have the same number of micro-batches, because some collectives
run once per micro-batch; a micro-batch may be empty."""


class BudgetError(ValueError):
    """Raised if a row has more tokens than the token budget of a micro-batch."""


@dataclass(frozen=True)
class Planner:
    """Splits global batches into micro-batches that fit the token budget. Each
    micro-batch has a fixed cost for the device and for the host. `overhead_tokens` and
    `launch_tokens` express these costs as the number of tokens that the device
    processes in the same time. The strategy `grouped` weighs them against padding."""

    strategy: Strategy
    token_budget: int
    max_length: int
    world_size: int = 1
    overhead_tokens: int = 64
    launch_tokens: int = 0

    def plan(self, lengths: Ints) -> Plan:
        """Return the plan for a global batch whose rows have `lengths` (N,) in tokens.
        Raises BudgetError if a row is longer than the token budget."""
        longest = self.max_length if self.strategy == "fixed" else int(lengths.max())
        if longest > self.token_budget:
            raise BudgetError(
                f"a row of {longest} tokens does not fit train.token_budget="
                f"{self.token_budget}: raise it to at least tokenize.max_length="
                f"{self.max_length}, or shorten the rows"
            )
        if self.strategy == "packed":
            return self._packed(lengths)
        return self._padded(lengths)

    def _packed(self, lengths: Ints) -> Plan:
        """Assign each row, longest first, to the emptiest bin (LPT, Graham 1969)."""
        bins = -(-int(lengths.sum()) // (self.token_budget * self.world_size))
        while True:
            contents, fullest = _fill_bins(lengths, bins * self.world_size)
            if fullest <= self.token_budget:
                break
            bins += 1
        return tuple(
            tuple(contents[rank :: self.world_size]) for rank in range(self.world_size)
        )

    def _padded(self, lengths: Ints) -> Plan:
        """Group rows into slots (one row per rank), and slots into micro-batches."""
        order, budget = np.arange(len(lengths)), self.token_budget
        if self.strategy == "grouped":
            order = np.argsort(-lengths, kind="stable")
        begins = np.arange(0, len(order), self.world_size)
        longest = np.maximum.reduceat(lengths[order], begins)
        if self.strategy == "fixed":
            cuts = even_cuts(len(begins), budget // self.max_length)
        elif self.strategy == "random":
            cuts = greedy_cuts(longest, budget)
        else:
            overhead, launch = self.overhead_tokens, self.launch_tokens
            cuts = quickest_cuts(longest, budget, overhead, launch)
        ranks = range(self.world_size)
        return tuple(tuple(self._rank_rows(order, c, r) for c in cuts) for r in ranks)

    def _rank_rows(self, order: Ints, cut: tuple[int, int], rank: int) -> Ints:
        """Return the positions of the rows of `rank` in the slots of `cut`. The order
        of the ranks alternates, so that no rank always gets the longest row."""
        slots = np.arange(*cut)
        back = self.world_size - 1 - rank
        places = slots * self.world_size + np.where((slots - cut[0]) % 2, back, rank)
        return order[places[places < len(order)]]


def _fill_bins(lengths: Ints, bins: int) -> tuple[list[Ints], int]:
    """Distribute rows with these `lengths` (N,) almost equally over `bins` bins. Return
    the positions of each bin's rows, and the number of tokens in the fullest bin."""
    heap = [(0, index) for index in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    order = np.argsort(-lengths, kind="stable")
    for position, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        tokens, index = heap[0]
        contents[index].append(position)
        heapq.heapreplace(heap, (tokens + length, index))
    fullest = max(tokens for tokens, _ in heap)
    return [np.array(rows, dtype=np.int64) for rows in contents], fullest


def even_cuts(count: int, most: int) -> list[tuple[int, int]]:
    """Cut `count` slots into nearly equal ranges [a, b) of at most `most` slots."""
    parts = max(1, -(-count // most))
    places = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(places))


def greedy_cuts(lengths: Ints, budget: int) -> list[tuple[int, int]]:
    """Cut `lengths` (S,) into successive ranges [a, b). Each range is as long as
    possible while its padded size does not exceed `budget`."""
    cuts, start, longest = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if (index + 1 - start) * longest > budget:
            cuts.append((start, index))
            start, longest = index, length
    return [*cuts, (start, len(lengths))]


MOST_PLACES = 256
"""The maximum number of possible cuts. Without it, planning 1,408 rows took 40 ms."""


def cheapest_cuts(lengths: Ints, budget: int, overhead: int) -> list[tuple[int, int]]:
    """Cut descending `lengths` (S,) into the ranges [a, b) with the lowest total cost,
    by dynamic programming. The cost of a range is its number of tokens including
    padding, at most `budget`, plus `overhead`."""
    tokens = len(lengths) * int(lengths[0])
    if tokens <= budget and tokens - int(lengths.sum()) <= overhead:
        return [(0, len(lengths))]  # a second range could not save its own cost
    found = _places(lengths, budget)
    longest, places = lengths[found[:-1]].tolist(), found.tolist()
    cost, begin = [0.0], [0]
    for end in range(1, len(places)):
        least, place = math.inf, end - 1
        for start in range(end - 1, -1, -1):
            tokens = (places[end] - places[start]) * longest[start]
            if tokens > budget:
                break  # an earlier start would exceed the budget too
            if cost[start] + tokens <= least:
                least, place = cost[start] + tokens, start
        cost.append(least + overhead)
        begin.append(place)
    cuts, end = [], len(places) - 1
    while end > 0:
        cuts.append((places[begin[end]], places[end]))
        end = begin[end]
    return cuts[::-1]


def _places(lengths: Ints, budget: int) -> Ints:
    """Return the positions (P,) at which descending `lengths` (S,) may be cut,
    including both ends. If there are many rows, only every k-th position is returned,
    with k small enough to leave about eight positions per micro-batch."""
    few = min(-(-len(lengths) // MOST_PLACES), budget // (8 * int(lengths[0])))
    return np.append(np.arange(0, len(lengths), max(1, few)), len(lengths))


def quickest_cuts(
    lengths: Ints, budget: int, overhead: int, launch: int
) -> list[tuple[int, int]]:
    """Return the cheapest cuts of descending `lengths` (S,), or fewer cuts if the
    device would otherwise wait for the host, which works in parallel. The host needs as
    long per range as the device needs for `launch` tokens."""

    def sides(cuts: list[tuple[int, int]]) -> tuple[int, int]:
        device = sum((b - a) * int(lengths[a]) + overhead for a, b in cuts)
        return device, launch * len(cuts)

    found, price = [], max(1, overhead)
    while True:
        found.append(cheapest_cuts(lengths, budget, price))
        device, host = sides(found[-1])
        # An extra range saves under `budget` tokens, so higher prices have no effect.
        if device >= host or price >= budget or len(found[-1]) == 1:
            return min(found, key=lambda cuts: max(sides(cuts)))
        price *= 2
