"""Compare the time that compilation and graph captures take with the time they save.

The constants were measured with BERT-base and packed rows of 96 tokens, on an H100 and
an H200 (docs/benchmarks.md, docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

PEAK_SHARE, COMPILED_SHARE = 0.31, 0.44
"""The fractions of the data sheet's peak that BERT-base reaches with 256 rows per step:
uncompiled (5,553 samples/s) and compiled (7,821 samples/s)."""
LAYER_SAVES_S = 0.12e-3
"""The time in seconds that compiling saves per layer, for any number of tokens. The
constant part of a layer's time is 0.46 ms uncompiled and 0.34 ms compiled."""
HOST_S = 2.2e-3
"""The time in seconds that the host needs to launch the forward and backward pass of a
layer. For BERT-base, 12 layers take 24 ms (661 samples/s with 16 rows). If the device
needs less than this per layer, steps wait for the host, whether compiled or not."""
PART_S = 9.0
"""The time in seconds to compile one part of a model, or to start the compiler. BERT's
two parts took 24.5 s in total (H100, 16 cores). A warm disk cache would save most of
this time. The choice ignores the cache, so that it does not change between runs."""
STEPS_A_SHAPE = 2
"""The number of steps per shape that CUDA graphs do not make faster. The first step
runs without a graph, and the second one is captured."""


@dataclass(frozen=True)
class Work:
    """The planned work of one GPU, as far as it affects the choice."""

    steps: int
    step_flops: float
    """The FLOPs of the forward and backward pass of a step."""
    layers: int
    peak_tflops: float
    """The peak throughput from the data sheet, in TFLOP/s."""
    parts: int
    """The number of different parts of the model that would be compiled."""
    shapes: int
    """The number of distinct input shapes of the training step. One CUDA graph is
    captured per shape."""


@dataclass(frozen=True)
class Choice:
    """Whether to compile and to use CUDA graphs, and a sentence with the reason."""

    compile: bool
    cuda_graphs: bool
    reason: str = ""


def choose_compilation(
    work: Work, compiled: bool | None = None, recorded: bool | None = None
) -> Choice:
    """Return the choice that minimises the time for the planned work. If `compiled` or
    `recorded` (CUDA graphs) is not None, it is kept."""
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
    """Return how many seconds compiling saves per step."""
    peak_s = work.step_flops / (work.peak_tflops * 1e12)
    if not graphs and peak_s / PEAK_SHARE < HOST_S * work.layers:
        return 0.0
    faster_s = peak_s / PEAK_SHARE - peak_s / COMPILED_SHARE
    return faster_s + LAYER_SAVES_S * work.layers


def _state(on: bool) -> str:
    return "on" if on else "off"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"
