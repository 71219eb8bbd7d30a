"""Choice of the token budget from measured memory; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.engine.models.memory import GIB, Demand, rounded_down

ROOM = 0.9
"""Share of the available memory: gaps between blocks are unusable, and sizes differ
from step to step."""
TIGHT = 0.6
"""Share of memory above which gaps between blocks matter: up to a third of the steps'
memory (H200)."""
PLENTY = 1.5
"""If this multiple of the largest micro-batch fits by estimate, no pass is measured."""
FOLLOWED = 0.7
"""Share of the predicted budget that is measured next."""
FULL = 0.9
"""Share of the largest micro-batch above which no larger one is measured, because rows
do not fill it."""
Point = tuple[int, float]
"""Tokens of a pass, and its bytes."""
Measure = Callable[[int], Point | None]
"""Function from maximum tokens to a measurement; None if memory ran out."""


@dataclass(frozen=True)
class Bounds:
    """Possible numbers of tokens of micro-batches."""

    least: int
    """Tokens of the longest row."""
    most: int
    """Maximum tokens of a micro-batch."""


@dataclass(frozen=True)
class Fit:
    """Token budget that fits the memory, according to one rank."""

    token_budget: int
    reason: str = ""
    demand: Demand | None = None
    """None if no pass was measured."""
    tight: bool = False
    fault: str = ""
    """Reason why no step can fit."""


def is_plenty(guess: int, bounds: Bounds) -> bool:
    """Return whether `guess` far exceeds any possible need."""
    return guess >= PLENTY * bounds.most


def choose_budget(
    demand: Demand | None, bounds: Bounds, memory: int, wanted: int
) -> Fit:
    """Budget for `memory` bytes, at most the one `wanted`."""
    if demand is None:
        return Fit(bounds.least, fault=_too_long(bounds, memory))
    if demand.states > memory:
        return Fit(bounds.least, demand=demand, fault=_too_large(demand, memory))
    room, budget = ROOM * memory, wanted
    if demand.peak(min(budget, bounds.most)) > room:
        budget = min(budget, rounded_down(demand.most_tokens(room), bounds.least))
    peak = demand.peak(min(budget, bounds.most))
    reason = (
        f"token budget {budget:,}: steps need about {peak / GIB:.1f} of the "
        f"{memory / GIB:.1f} GiB of GPU memory within reach"
    )
    return Fit(budget, reason, demand, tight=peak > TIGHT * memory)


def combine_ranks(own: Fit, gathered: Sequence[Fit]) -> Fit:
    """Budget that fits on all ranks, which must divide batches equally."""
    least = min(gathered, key=lambda fit: fit.token_budget)
    tight = any(fit.tight for fit in gathered)
    fault = next((fit.fault for fit in gathered if fit.fault), "")
    return replace(least, tight=tight, fault=fault, demand=own.demand)


def fit_from_estimate(wanted: int, bounds: Bounds, guess: int | None) -> Fit:
    """Return the budget from an estimate, for passes that cannot be measured."""
    if guess is None or guess >= bounds.most:
        return Fit(wanted)
    return Fit(min(wanted, rounded_down(guess, bounds.least)), tight=True)


def points(
    measure: Measure, start: int, bounds: Bounds, free_bytes: float
) -> list[Point]:
    """Two measurements, in ascending order: at `start`, or below it if memory runs out,
    and near the size that fits `free_bytes` according to it. Empty if the longest row
    does not fit; one if whole rows make both sizes the same pass."""
    tokens = min(max(start, bounds.least), bounds.most)
    while (first := measure(tokens)) is None:
        if tokens <= bounds.least:
            return []
        tokens = max(bounds.least, tokens // 4)
    second = measure(_second_size(first, bounds, free_bytes))
    return sorted({first[0]: first[1], **dict([second] if second else [])}.items())


def _second_size(first: Point, bounds: Bounds, free_bytes: float) -> int:
    """Size near the limit predicted by the first; half of it if it is hardly larger."""
    tokens, taken = first
    fitting = int(tokens * free_bytes / max(taken, 1.0))
    larger = min(bounds.most, int(FOLLOWED * fitting))
    if tokens < FULL * bounds.most and larger > tokens:
        return larger
    half = tokens // 2
    return half if half >= bounds.least else min(bounds.most, (tokens + fitting) // 2)


def _too_large(demand: Demand, memory: int) -> str:
    return (
        f"weights, gradients and the optimizer's moments need {demand.states / GIB:.1f}"
        f" of the {memory / GIB:.1f} GiB of GPU memory within reach: set "
        "train.freeze, train.optimizer: adafactor, train.distributed.strategy: fsdp on "
        "several GPUs, or use a smaller model"
    )


def _too_long(bounds: Bounds, memory: int) -> str:
    return (
        f"one row of {bounds.least} tokens does not fit in the {memory / GIB:.1f} GiB "
        "of GPU memory within reach: set train.gradient_checkpointing: true, lower "
        "tokenize.max_length, or use a smaller model"
    )
