"""Seconds of a command by named phase.

All phases add up to the wall time since the process began. The training's report
contains the seconds of a training, in this process or in its ranks.
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
"""Phases in the order of the table; other pipelines' phases have their names."""
SHOWN_S = 0.005


class PhaseClock:
    """Seconds by phase."""

    def __init__(self, since_s: float) -> None:
        """`since_s`: start of the first phase, in seconds of time.perf_counter."""
        self._since_s = since_s
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str, now_s: float | None = None) -> None:
        """Count the seconds since the last mark as `phase`."""
        now_s = time.perf_counter() if now_s is None else now_s
        self.move({phase: now_s - self._since_s})
        self._since_s = now_s

    def move(self, parts: Mapping[str, float], source: str | None = None) -> None:
        """Add seconds to phases; subtract them from `source`, if given."""
        for phase, seconds in parts.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            if source is not None:
                self.seconds[source] -= seconds


def process_age_s() -> float:
    """Seconds since this process began. psutil is up to a second off on Linux, because
    it adds the clock ticks to a boot time in whole seconds."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return time.time() - psutil.Process().create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def table(seconds: Mapping[str, float]) -> Table:
    """Return one line per phase: seconds, and the share of the total."""
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
    """`created_s`: start of the configuration. The process's age counts if a command
    line started it, but not in a notebook."""
    is_command = click.get_current_context(silent=True) is not None
    begin_s = time.perf_counter() - process_age_s() if is_command else created_s
    clock = PhaseClock(begin_s)
    clock.mark("imports", created_s)
    return clock


def phase_of(node: Node) -> str:
    """Return the phase of the pipeline that contains the node."""
    pipeline = (node.namespace or node.short_name).rpartition(".")[2]
    return OF_PIPELINE.get(pipeline, pipeline)
