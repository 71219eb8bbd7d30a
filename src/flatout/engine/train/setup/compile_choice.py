"""Comparison of the time that compiling and recording cost and save within a run.

The constants were measured for BERT-base with packed rows of 96 tokens, on an H100 and
an H200 (docs/benchmarks.md, docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

PEAK_SHARE, COMPILED_SHARE = 0.31, 0.44
"""Share of the data sheet's peak in steps of BERT-base at 256, uncompiled (5,553
samples/s) and compiled (7,821)."""
LAYER_SAVES_S = 0.12e-3
"""Time saved per layer by compiling, for any number of tokens: 0.46 and 0.34 ms."""
HOST_S = 2.2e-3
"""Time to launch a layer, forward and backward: 24 ms for 12 (661 samples/s at 16).
Steps with less computation per layer wait for the host, compiled or not."""
PART_S = 9.0
"""Seconds to compile a distinct part, and to start: 24.5 for BERT's two (H100, 16
cores). A filled disk cache saves most of it; that does not count, so that a choice is
repeated."""
STEPS_A_SHAPE = 2
"""Number of slow steps per shape: the first is launched and the second recorded, each
as slow as a step without graphs."""


@dataclass(frozen=True)
class Work:
    """Planned work of one GPU."""

    steps: int
    step_flops: float
    """FLOPs of forward and backward."""
    layers: int
    peak_tflops: float
    """Peak rate in the data sheet."""
    parts: int
    """Number of distinct compiled parts."""
    shapes: int
    """Number of shapes of a step's tensors, each of which is recorded once."""


@dataclass(frozen=True)
class Choice:
    """The choice, and a sentence with its reason."""

    compile: bool
    cuda_graphs: bool
    reason: str = ""


def choose_compilation(
    work: Work, compiled: bool | None = None, recorded: bool | None = None
) -> Choice:
    """Keep the settings `compiled` and `recorded`; for None choose the faster run."""
    cost_s = PART_S * (1 + work.parts)
    graphs = recorded
    if graphs is None:
        graphs = work.steps > STEPS_A_SHAPE * work.shapes
    saved_s = work.steps * _saved_s(work, graphs)
    on = saved_s > cost_s if compiled is None else compiled
    reason = (
        f"compile {_state(on)}: costs about {_seconds(cost_s)}, saves about "
        f"{_seconds(saved_s)}; CUDA graphs {_state(graphs)} ({work.steps:,} steps)"
    )
    return Choice(on, graphs, reason)


def _saved_s(work: Work, graphs: bool) -> float:
    """Seconds saved per step by compiling."""
    peak_s = work.step_flops / (work.peak_tflops * 1e12)
    if not graphs and peak_s / PEAK_SHARE < HOST_S * work.layers:
        return 0.0
    faster_s = peak_s / PEAK_SHARE - peak_s / COMPILED_SHARE
    return faster_s + LAYER_SAVES_S * work.layers


def _state(on: bool) -> str:
    return "on" if on else "off"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"
