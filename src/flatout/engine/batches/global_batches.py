"""Global batches and plans: the rows of a step, and their division into parts.

Pure functions of row numbers and lengths. The rows of a step depend on (seed, epoch,
step, data size) only; their division into micro-batches for the ranks may change
speed and memory, never the gradient.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flatout.engine.parameters import Strategy
from flatout.engine.rows.layout import Ints

FEISTEL_ROUNDS = 8
BLOCK = 4096
"""Positions of an epoch that are permuted at once: 13 cost as much as a thousand."""


@dataclass(frozen=True)
class GlobalBatches:
    """The sequence of global batches: a pure function of seed and data size.

    An epoch is a pseudo-random permutation of the rows that is computed point by
    point (Feistel network with cycle walking, Black & Rogaway 2002), so a step
    costs only its own rows, for any size of the data. The last batch of an epoch
    has the remaining rows.
    """

    num_rows: int
    batch_size: int
    seed: int
    skipped: tuple[int, ...] = ()
    """Rows that are left out: their global batches are smaller, all others the same."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def total_steps(self, epochs: float, max_steps: int | None = None) -> int:
        """Number of steps: `max_steps`, or those of `epochs` epochs, rounded up."""
        if max_steps is not None:
            return max_steps
        return math.ceil(epochs * self.steps_per_epoch - 1e-9)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> Ints:
        """Row numbers (N,) of `step`, counted from 0 over all epochs."""
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
        """Step (N,) of an epoch that has each of `rows` (N,), skipped or not."""
        positions = unpermute(rows, self.num_rows, self.seed, epoch)
        return epoch * self.steps_per_epoch + positions // self.batch_size


@lru_cache(maxsize=2)
def _block(number: int, size: int, seed: int, epoch: int) -> Ints:
    """Images of one block's positions, cached because small batches share a block."""
    begin = number * BLOCK
    return permute(np.arange(begin, min(begin + BLOCK, size)), size, seed, epoch)


def permute(positions: Ints, size: int, seed: int, epoch: int) -> Ints:
    """Images (N,) of `positions` (N,) under the permutation of `range(size)`."""
    return _walk(positions, size, seed, epoch, _feistel)


def unpermute(images: Ints, size: int, seed: int, epoch: int) -> Ints:
    """Positions (N,) whose images are `images` (N,): the inverse of `permute`."""
    return _walk(images, size, seed, epoch, _inverse_feistel)


Numbers = npt.NDArray[np.uint64]


def _walk(
    numbers: Ints,
    size: int,
    seed: int,
    epoch: int,
    bijection: Callable[[Numbers, int, Numbers], Numbers],
) -> Ints:
    """Apply `bijection` until all numbers (N,) are below `size`."""
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    sequence = np.random.SeedSequence([seed, epoch])
    keys = sequence.generate_state(FEISTEL_ROUNDS, np.uint64).astype(np.uint64)
    images = numbers.astype(np.uint64)
    outside = np.ones(len(images), dtype=bool)
    while outside.any():  # on average under four passes: the domain is < 4 * size
        images[outside] = bijection(images[outside], half_bits, keys)
        outside = images >= size
    return images.astype(np.int64)


def _feistel(values: Numbers, half_bits: int, keys: Numbers) -> Numbers:
    """One keyed bijection of the numbers of `2 * half_bits` bits, (N,) -> (N,)."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _inverse_feistel(values: Numbers, half_bits: int, keys: Numbers) -> Numbers:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys[::-1]:
        left, right = right ^ (_mix(left ^ key) & mask), left
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014), wrapping around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


Plan = tuple[tuple[Ints, ...], ...]
"""Division of one global batch: `[rank][k]` has positions (B,) in the batch. All ranks
have the same number of micro-batches, because some collectives run once per micro-
batch; some of them may be empty."""


class BudgetError(ValueError):
    """A row is longer than the token budget of a micro-batch."""


@dataclass(frozen=True)
class Planner:
    """Cuts global batches under a token budget. One more micro-batch costs the device
    the time of `overhead_tokens`, and the host the time that the device needs for
    `launch_tokens`; `grouped` weighs both against padding."""

    strategy: Strategy
    token_budget: int
    max_length: int
    world_size: int = 1
    overhead_tokens: int = 64
    launch_tokens: int = 0

    def plan(self, lengths: Ints) -> Plan:
        """Plan for rows of `lengths` (N,). Raises BudgetError."""
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
        """Assign rows to the emptiest bin, longest first (LPT: Graham 1969)."""
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
        """Cut slots, each with one row per rank, into runs."""
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
        """Rows of one rank in the slots of `cut`; the order of the ranks alternates
        between slots, so that no rank gets the longer row every time."""
        slots = np.arange(*cut)
        back = self.world_size - 1 - rank
        places = slots * self.world_size + np.where((slots - cut[0]) % 2, back, rank)
        return order[places[places < len(order)]]


def _fill_bins(lengths: Ints, bins: int) -> tuple[list[Ints], int]:
    """Fill `bins` bins almost equally; also return the fullest bin's tokens."""
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
    """Runs [a, b) of `count` slots, each at most `most`, as equal as possible."""
    parts = max(1, -(-count // most))
    places = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(places))


def greedy_cuts(lengths: Ints, budget: int) -> list[tuple[int, int]]:
    """Cut `lengths` into the longest ranges [a, b) whose padded size fits `budget`."""
    cuts, start, longest = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if (index + 1 - start) * longest > budget:
            cuts.append((start, index))
            start, longest = index, length
    return [*cuts, (start, len(lengths))]


MOST_PLACES = 256
"""Maximum of possible cuts: planning 1,408 rows with a cut anywhere needed 40 ms."""


def cheapest_cuts(lengths: Ints, budget: int, overhead: int) -> list[tuple[int, int]]:
    """Runs [a, b) of descending `lengths` (S,), each within `budget`, with the least
    padded tokens plus `overhead` per run. Dynamic programming over run ends."""
    tokens = len(lengths) * int(lengths[0])
    if tokens <= budget and tokens - int(lengths.sum()) <= overhead:
        return [(0, len(lengths))]  # a second run could not save its own cost
    found = _places(lengths, budget)
    longest, places = lengths[found[:-1]].tolist(), found.tolist()
    cost, begin = [0.0], [0]
    for end in range(1, len(places)):
        least, place = math.inf, end - 1
        for start in range(end - 1, -1, -1):
            tokens = (places[end] - places[start]) * longest[start]
            if tokens > budget:
                break  # so is each run that begins before it
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
    """Positions (P,) at which descending `lengths` (S,) may be cut, both ends included:
    all, or every few rows, if eight times that many fit the budget."""
    few = min(-(-len(lengths) // MOST_PLACES), budget // (8 * int(lengths[0])))
    return np.append(np.arange(0, len(lengths), max(1, few)), len(lengths))


def quickest_cuts(
    lengths: Ints, budget: int, overhead: int, launch: int
) -> list[tuple[int, int]]:
    """The cheapest cuts of descending `lengths` (S,), or fewer if the device would wait
    for the host, which needs the time of `launch` tokens per run; both work at once."""

    def sides(cuts: list[tuple[int, int]]) -> tuple[int, int]:
        device = sum((b - a) * int(lengths[a]) + overhead for a, b in cuts)
        return device, launch * len(cuts)

    found, price = [], max(1, overhead)
    while True:
        found.append(cheapest_cuts(lengths, budget, price))
        device, host = sides(found[-1])
        # A run never saves a whole budget, and one run is the minimum.
        if device >= host or price >= budget or len(found[-1]) == 1:
            return min(found, key=lambda cuts: max(sides(cuts)))
        price *= 2
