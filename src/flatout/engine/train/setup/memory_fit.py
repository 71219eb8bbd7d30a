"""Choice of the token budget from measured memory; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.engine.models.memory import GIB, Demand, rounded_down

ROOM = 0.9
"""Share of the available memory: gaps between blocks are unusable, and sizes differ
from step to step."""
KEPT_ROOM = 0.97
"""A resumed run keeps its budget, and bitwise results, up to this share of memory."""
TIGHT = 0.6
"""Share of memory above which gaps between blocks matter: up to a third of the steps'
memory (H200)."""
PLENTY = 1.5
"""If this multiple of the estimate fits, no pass is measured."""
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
    several: bool
    """True if gradients exist before a micro-batch of `most` tokens."""
    step: float
    """Maximum tokens of nearly all steps."""


@dataclass(frozen=True)
class Fit:
    """Settings that fit the memory, according to one rank."""

    token_budget: int
    cuda_graphs: bool
    reason: str = ""
    demand: Demand | None = None
    """None if no pass was measured."""
    tight: bool = False
    fault: str = ""
    """Reason why no step can fit."""


def is_plenty(guess: int, bounds: Bounds, *, graphs: bool) -> bool:
    """Return whether the `guess` far exceeds all possible needs."""
    needed = max(bounds.most, 2 * bounds.step) if graphs else bounds.most
    return guess >= PLENTY * needed


def choose_budget(
    demand: Demand | None,
    bounds: Bounds,
    memory: int,
    wanted: Fit,
    kept: int | None = None,
) -> Fit:
    """Settings for `memory` bytes, at most those `wanted`. Graphs are kept if a step
    fits twice, and the budget `kept` of a resumed run if it nearly fits."""
    if demand is None:
        return Fit(bounds.least, False, fault=_too_long("does not fit", bounds, memory))
    if demand.states > memory:
        return Fit(bounds.least, False, demand=demand, fault=_too_large(demand, memory))
    room, graphs, told = ROOM * memory, wanted.cuda_graphs, ""
    if graphs:
        fitting = demand.most_tokens(room, graphs=True)
        graphs = fitting >= min(bounds.step, bounds.most)
        told = "" if graphs else "; no CUDA graphs, which would need the same again"

    def peak(budget: int) -> float:
        return expected_peak(demand, bounds, budget, graphs=graphs)

    budget = wanted.token_budget
    if peak(budget) > room:
        fitting = demand.most_tokens(room, graphs=graphs)
        budget = min(budget, rounded_down(fitting, bounds.least))
    if kept is not None:
        budget = kept if peak(kept) <= KEPT_ROOM * memory else min(kept, budget)
    if peak(budget) > memory:
        told = _too_long("hardly fits", bounds, memory)
        return Fit(budget, graphs, told, demand, tight=True)
    told = (
        f"token budget {budget:,}: steps need about {peak(budget) / GIB:.1f} of the "
        f"{memory / GIB:.1f} GiB of GPU memory within reach{told}"
    )
    return Fit(budget, graphs, told, demand, tight=peak(budget) > TIGHT * memory)


def expected_peak(
    demand: Demand, bounds: Bounds, budget: int, *, graphs: bool = False
) -> float:
    """Predicted peak bytes of steps with `budget`."""
    tokens = min(budget, bounds.most)
    several = bounds.several or tokens < bounds.most
    return demand.peak(tokens, several=several, graphs=graphs)


def together(own: Fit, gathered: Sequence[Fit]) -> Fit:
    """Settings that fit on all ranks, which must divide batches equally."""
    least = min(gathered, key=lambda fit: fit.token_budget)
    graphs = all(fit.cuda_graphs for fit in gathered)
    tight = any(fit.tight for fit in gathered)
    fault = next((fit.fault for fit in gathered if fit.fault), "")
    agreed = replace(least, cuda_graphs=graphs, tight=tight, fault=fault)
    return replace(agreed, demand=own.demand)


def by_guess(
    wanted: Fit, bounds: Bounds, guess: int | None, kept: int | None = None
) -> Fit:
    """Settings from an estimate, if passes cannot be measured; the budget `kept` of a
    resumed run stays, and with it bitwise results."""
    if guess is None or guess >= bounds.most:
        return wanted if kept is None else replace(wanted, token_budget=kept)
    budget = min(wanted.token_budget, rounded_down(guess, bounds.least))
    return replace(wanted, token_budget=kept or budget, tight=True)


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


def _too_long(fits: str, bounds: Bounds, memory: int) -> str:
    return (
        f"one row of {bounds.least} tokens {fits} in the {memory / GIB:.1f} GiB "
        "of GPU memory within reach: set train.gradient_checkpointing: true, lower "
        "tokenize.max_length, or use a smaller model"
    )
