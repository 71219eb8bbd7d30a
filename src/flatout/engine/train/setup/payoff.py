"""Whether compiling and recording pay within a run: least time in all, as one pure
function of the work planned."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

Options = tuple[bool, ...]
"""Both where there is a choice, else the one that must be."""
OPEN: Options = (False, True)

LAYER_WEIGHTS = 12
"""Of a layer, in squares of its width."""
HOST_S = 2.2e-3
"""What launching a layer takes the host, forward and backward, compiled or not: 24 ms
for the 12 of BERT-base (661 samples/s at 16) and 25 to 33. Page:
2026-11-23_optimisation-figures_h200-and-2-cores.md."""
FLOOR_S = {False: 0.46e-3, True: 0.34e-3}
"""What a layer takes a GPU however few its tokens, by whether it is compiled: between
the steps of BERT-base at 16 (1,975 and 2,748 samples/s with graphs) and 256 (5,553 and
7,821) lies a line that begins there. The same page."""
PEAK_SHARE = {False: 0.31, True: 0.44}
"""Of a data sheet's peak, by which that line rises (rows of 96.1 tokens)."""
APART = 1.06
"""A step's kernels take the GPU longer where each is launched: 7,668 and 8,160
samples/s at 256. The same page."""
START_S, PART_S = 8.0, 8.0
"""Compiling, and each distinct part of it: 24 s for BERT's two, whatever their size
(25 to 30 for BERT-base, 23 for `conf/base`), 20 for Qwen3's; over 240 where 28 layers
are one graph. Page: 2026-11-22_what-helped_h200.md."""
CACHED_SHARE = 0.2
"""Of these seconds where the cache on the disk is filled: 4.5 to 5.5 of 25 to 30. Page:
2026-11-22_engine_h200.md."""


@dataclass(frozen=True)
class Work:
    """What is planned, for one GPU."""

    steps: int
    tokens: float
    """A step's."""
    layers: int
    width: float
    """Of the hidden states; a layer has LAYER_WEIGHTS x width^2 weights."""
    peak_tflops: float
    """By the data sheet."""
    parts: int
    """Distinct ones that are compiled."""
    shapes: int
    """Of a step's tensors, each of which is recorded once."""
    cached: bool = False
    """What is compiled lies on the disk already."""


@dataclass(frozen=True)
class Choice:
    """What least time comes to, and the sentence that says why."""

    compile: bool
    cuda_graphs: bool
    reason: str = ""


def choose_compilation(work: Work, compiled: Options, recorded: Options) -> Choice:
    """Of the options those that end soonest; of equals the plainer ones."""

    def total_s(plan: tuple[bool, bool]) -> float:
        return _steps_s(work, *plan) + _cost_s(work, *plan)

    on, graphs = min(product(compiled, recorded), key=total_s)
    saved_s = _steps_s(work, False, graphs) - _steps_s(work, True, graphs)
    spared_s = _steps_s(work, on, False) - _steps_s(work, on, True)
    told = [
        _told("compile", on, compiled, compile_s(work), saved_s),
        _told("CUDA graphs", graphs, recorded, record_s(work), spared_s),
    ]
    return Choice(on, graphs, f"{'; '.join(told)} ({work.steps:,} steps)")


def compile_s(work: Work) -> float:
    """Seconds of compiling, until all parts have run once."""
    whole_s = START_S + PART_S * work.parts
    return whole_s * (CACHED_SHARE if work.cached else 1)


def record_s(work: Work) -> float:
    """Seconds of recording: a launch a shape."""
    return min(work.shapes, work.steps) * HOST_S * work.layers


def step_s(work: Work, compiled: bool, recorded: bool) -> float:
    """Seconds of a step: the GPU's, or the host's where it launches each kernel and
    takes longer."""
    flops = 6 * LAYER_WEIGHTS * work.width**2 * work.layers * work.tokens
    rate = PEAK_SHARE[compiled] * work.peak_tflops * 1e12
    device_s = FLOOR_S[compiled] * work.layers + flops / rate
    return device_s if recorded else max(HOST_S * work.layers, APART * device_s)


def _steps_s(work: Work, compiled: bool, recorded: bool) -> float:
    """Of all steps; a shape's first one is launched in any case."""
    launched = min(work.shapes, work.steps) if recorded else work.steps
    replayed = work.steps - launched
    return launched * step_s(work, compiled, False) + replayed * step_s(
        work, compiled, True
    )


def _cost_s(work: Work, compiled: bool, recorded: bool) -> float:
    return compiled * compile_s(work) + recorded * record_s(work)


def _told(name: str, on: bool, options: Options, cost_s: float, saved_s: float) -> str:
    state = f"{name} {'on' if on else 'off'}"
    if len(options) == 1:
        return f"{state}: the only choice here"
    return f"{state}: costs about {_seconds(cost_s)}, saves about {_seconds(saved_s)}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if abs(value) < 10 else f"{value:,.0f} s"
