"""Which token budget memory holds: pure, from what passes of some sizes took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.engine.models.memory import GIB, Demand, rounded_down

ROOM = 0.9
"""Of the memory within reach: between blocks in use lies memory that nothing fits in,
and sizes differ from step to step."""
KEPT_ROOM = 0.97
"""A resumed run keeps its budget, and its bits, unless memory is shorter than this."""
TIGHT = 0.6
"""If steps take more of the memory, what lies unused between blocks counts: up to a
third of what they need (H200)."""
PLENTY = 1.5
"""Where so many times the guess fits, nothing is measured."""
FOLLOWED = 0.7
"""Of what the first measurement says will fit, measured next."""
FULL = 0.9
"""Of the largest micro-batch, from which on nothing larger is measured: rows do not
fill it."""
Point = tuple[int, float]
"""Tokens of a pass, and its bytes."""
Measure = Callable[[int], Point | None]
"""Most tokens of a pass -> what it took; None where memory ran out."""


@dataclass(frozen=True)
class Bounds:
    """Tokens of micro-batches that are asked about."""

    least: int
    """Of the longest row."""
    most: int
    """More are never in one."""
    several: bool
    """Whether gradients lie ready before a micro-batch of `most` tokens."""
    step: float
    """Of nearly all steps, at most."""


@dataclass(frozen=True)
class Fit:
    """What the memory holds, in the word of one rank."""

    token_budget: int
    cuda_graphs: bool
    reason: str = ""
    demand: Demand | None = None
    """None where nothing was measured."""
    tight: bool = False
    fault: str = ""
    """Why no step can fit."""


def is_plenty(guess: int, bounds: Bounds, *, graphs: bool) -> bool:
    """Whether the `guess` of what fits is far beyond all that may be needed."""
    needed = max(bounds.most, 2 * bounds.step) if graphs else bounds.most
    return guess >= PLENTY * needed


def choose_budget(
    demand: Demand | None,
    bounds: Bounds,
    memory: int,
    wanted: Fit,
    kept: int | None = None,
) -> Fit:
    """Of `memory` bytes, at most what is `wanted`. Graphs stay where a step fits twice,
    and a budget that was `kept` where it nearly fits."""
    if demand is None:
        return Fit(bounds.least, False, fault=_too_long("does not fit", bounds, memory))
    if demand.states > memory:
        return Fit(bounds.least, False, demand=demand, fault=_too_large(demand, memory))
    room, graphs, told = ROOM * memory, wanted.cuda_graphs, ""
    if graphs:
        fitting = demand.most_tokens(room, graphs=True)
        graphs = fitting >= min(bounds.step, bounds.most)
        told = "" if graphs else "; no CUDA graphs, which would take as much again"

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
        f"token budget {budget:,}: steps take about {peak(budget) / GIB:.1f} of the "
        f"{memory / GIB:.1f} GiB of GPU memory within reach{told}"
    )
    return Fit(budget, graphs, told, demand, tight=peak(budget) > TIGHT * memory)


def expected_peak(
    demand: Demand, bounds: Bounds, budget: int, *, graphs: bool = False
) -> float:
    """Bytes of steps under `budget`."""
    tokens = min(budget, bounds.most)
    several = bounds.several or tokens < bounds.most
    return demand.peak(tokens, several=several, graphs=graphs)


def together(own: Fit, gathered: Sequence[Fit]) -> Fit:
    """What fits on all ranks: they cut a global batch alike."""
    least = min(gathered, key=lambda fit: fit.token_budget)
    graphs = all(fit.cuda_graphs for fit in gathered)
    tight = any(fit.tight for fit in gathered)
    fault = next((fit.fault for fit in gathered if fit.fault), "")
    agreed = replace(least, cuda_graphs=graphs, tight=tight, fault=fault)
    return replace(agreed, demand=own.demand)


def by_guess(
    wanted: Fit, bounds: Bounds, guess: int | None, kept: int | None = None
) -> Fit:
    """Where nothing can be measured; a budget that was `kept` stays, and with it the
    bits of a resumed run."""
    if guess is None or guess >= bounds.most:
        return wanted if kept is None else replace(wanted, token_budget=kept)
    budget = min(wanted.token_budget, rounded_down(guess, bounds.least))
    return replace(wanted, token_budget=kept or budget, tight=True)


def points(
    measure: Measure, start: int, bounds: Bounds, free_bytes: float
) -> list[Point]:
    """Two measurements, in rising order: at `start`, or below it if memory runs out,
    and near what `free_bytes` hold by that one. None if the longest row does not fit;
    one if whole rows make both sizes the same pass."""
    tokens = min(max(start, bounds.least), bounds.most)
    while (first := measure(tokens)) is None:
        if tokens <= bounds.least:
            return []
        tokens = max(bounds.least, tokens // 4)
    second = measure(_second_size(first, bounds, free_bytes))
    return sorted({first[0]: first[1], **dict([second] if second else [])}.items())


def _second_size(first: Point, bounds: Bounds, free_bytes: float) -> int:
    """Towards what fits by the first; half of it if that is hardly more."""
    tokens, taken = first
    fitting = int(tokens * free_bytes / max(taken, 1.0))
    larger = min(bounds.most, int(FOLLOWED * fitting))
    if tokens < FULL * bounds.most and larger > tokens:
        return larger
    half = tokens // 2
    return half if half >= bounds.least else min(bounds.most, (tokens + fitting) // 2)


def _too_large(demand: Demand, memory: int) -> str:
    return (
        f"weights, gradients and the optimizer's moments take {demand.states / GIB:.1f}"
        f" of the {memory / GIB:.1f} GiB of GPU memory within reach: set "
        "train.freeze, train.optimizer: adafactor, train.distributed.strategy: fsdp on "
        "several GPUs, or take a smaller model"
    )


def _too_long(fits: str, bounds: Bounds, memory: int) -> str:
    return (
        f"one row of {bounds.least} tokens {fits} in the {memory / GIB:.1f} GiB "
        "of GPU memory within reach: set train.gradient_checkpointing: true, lower "
        "tokenize.max_length, or take a smaller model"
    )
