"""Where the time of a command went: seconds by named phase.

All phases add up to the wall time since the process began. What a training spent, here
or in its ranks, its report says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import click
import psutil
from kedro.pipeline.node import Node
from rich.table import Table

from flatout.engine.files.owner import start_ticks

OF_PIPELINE = {
    **dict.fromkeys(("split", "tokenize", "arrays", "images"), "data"),
    "evaluate": "evaluation",
}
PHASES = {
    "imports": "interpreter and imports",
    "configuration": "configuration",
    "loading": "inputs of nodes",
    "data": "data",
    "model": "model and tokenizer",
    "compilation": "compilation",
    "first_step": "first step",
    "steps": "steps",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "pictures": "pictures",
    "saving": "saving",
    "tracking": "tracking",
    "rest": "rest",
}
"""In the order of the table; phases of other pipelines have the pipeline's name."""
SHOWN_S = 0.005


class PhaseClock:
    """Seconds by phase."""

    def __init__(self, since_s: float) -> None:
        """`since_s`: when the first phase began, as time.perf_counter counts."""
        self._since_s = since_s
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str, now_s: float | None = None) -> None:
        """What passed since the last mark was `phase`."""
        now_s = time.perf_counter() if now_s is None else now_s
        self.move({phase: now_s - self._since_s})
        self._since_s = now_s

    def move(self, parts: Mapping[str, float], source: str | None = None) -> None:
        """Add seconds of phases, which were `source` until now."""
        for phase, seconds in parts.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            if source is not None:
                self.seconds[source] -= seconds


def process_age_s() -> float:
    """Since this process began. psutil alone is up to a second off on Linux, where it
    adds the clock ticks to a time of boot in whole seconds."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return time.time() - psutil.Process().create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def table(seconds: Mapping[str, float]) -> Table:
    """A line a phase: seconds, and the share of all."""
    wall_s = sum(seconds.values())
    result = Table(title=f"where {wall_s:.1f} s went", title_justify="left", box=None)
    result.add_column("phase")
    result.add_column("s", justify="right")
    result.add_column("%", justify="right")
    for name, spent_s in seconds.items():
        if spent_s >= SHOWN_S:
            share = f"{100 * spent_s / wall_s:.1f}"
            result.add_row(PHASES.get(name, name), f"{spent_s:.2f}", share)
    return result


def begun(created_s: float) -> PhaseClock:
    """`created_s`: when the configuration began. The process is the command's if a
    command line started it; a notebook's is not, and its time is not counted."""
    is_command = click.get_current_context(silent=True) is not None
    begin_s = time.perf_counter() - process_age_s() if is_command else created_s
    clock = PhaseClock(begin_s)
    clock.mark("imports", created_s)
    return clock


def phase_of(node: Node) -> str:
    """By the pipeline that has the node."""
    pipeline = (node.namespace or node.short_name).partition(".")[0]
    return OF_PIPELINE.get(pipeline, pipeline)
