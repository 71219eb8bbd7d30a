"""Whether compiling and recording repay their time within a run.

The constants are measured: BERT-base in rows of 96 tokens, packed, on an H100 and an
H200 (docs/benchmarks.md, docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

PEAK_SHARE, COMPILED_SHARE = 0.31, 0.44
"""Of the data sheet's peak, in steps of BERT-base at 256, uncompiled (5,553 samples/s)
and compiled (7,821)."""
LAYER_SAVES_S = 0.12e-3
"""What compiling saves of a layer however few its tokens: 0.46 and 0.34 ms."""
HOST_S = 2.2e-3
"""To launch a layer, forward and backward: 24 ms for 12 (661 samples/s at 16). A step
whose layers compute for less waits for the host, compiled or not."""
PART_S = 11.0
"""Seconds to compile a distinct part, and to start: 25 to 42 for BERT's two."""
CACHED_SHARE = 0.2
"""Of these seconds if the cache on the disk is filled: 4 to 7."""
STEPS_A_SHAPE = 2
"""A shape's first step is launched and its second one recorded, each as slow as a step
without graphs: it has to come back after these."""


@dataclass(frozen=True)
class Work:
    """What is planned, for one GPU."""

    steps: int
    step_flops: float
    """Forward and backward."""
    layers: int
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
    """What was chosen, and the sentence that says why."""

    compile: bool
    cuda_graphs: bool
    reason: str = ""


def choose_compilation(
    work: Work, compiled: bool | None = None, recorded: bool | None = None
) -> Choice:
    """What is set, `compiled` and `recorded`, stays; None: what ends the run sooner."""
    cost_s = PART_S * (1 + work.parts) * (CACHED_SHARE if work.cached else 1)
    graphs = recorded
    if graphs is None:
        graphs = work.steps > STEPS_A_SHAPE * work.shapes
    saved_s = work.steps * _saved_s(work, graphs)
    on = saved_s > cost_s if compiled is None else compiled
    told = [
        f"compile {_state(on)}: costs about {_seconds(cost_s)}, saves about "
        f"{_seconds(saved_s)}",
        f"CUDA graphs {_state(graphs)}",
    ]
    return Choice(on, graphs, f"{'; '.join(told)} ({work.steps:,} steps)")


def _saved_s(work: Work, graphs: bool) -> float:
    """By compiling, in a step."""
    peak_s = work.step_flops / (work.peak_tflops * 1e12)
    if not graphs and peak_s / PEAK_SHARE < HOST_S * work.layers:
        return 0.0
    faster_s = peak_s / PEAK_SHARE - peak_s / COMPILED_SHARE
    return faster_s + LAYER_SAVES_S * work.layers


def _state(on: bool) -> str:
    return "on" if on else "off"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"
