"""Where the time of a command went: seconds by named phase, which Kedro's hooks mark.

All phases add up to the wall time since the process began. What a training spent, here
or in its ranks, its report says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
import psutil
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console
from rich.table import Table

from flatout.engine.files.owner import start_ticks
from flatout.places import use_project
from flatout.project.hooks import TrackingHooks
from flatout.project.parameters.hooks import loader_of

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
WIDTH = 100
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


class PhaseHooks:
    """Marks the clock, and prints it at the end."""

    def __init__(self, tracking: TrackingHooks) -> None:
        self._tracking = tracking

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """The process is the command's if a command line started it; a notebook's is
        not, and the clock begins with the configuration. This hook is the first of
        all: what the next ones read is of this session's project."""
        use_project(context.project_path)
        created_s = loader_of(context).created_s
        is_command = click.get_current_context(silent=True) is not None
        begin_s = time.perf_counter() - process_age_s() if is_command else created_s
        self._clock = PhaseClock(begin_s)
        self._clock.mark("imports", created_s)

    @hook_impl(trylast=True)
    def before_pipeline_run(self) -> None:
        self._clock.mark("configuration")

    @hook_impl
    def before_node_run(self) -> None:
        """Kedro has loaded the node's inputs."""
        self._clock.mark("loading")

    @hook_impl
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> None:
        phase = _phase_of(node)
        self._clock.mark(phase)
        if node.short_name == "train_model":
            spent = {} if self._tracking.reused else outputs["train_report"]["phases_s"]
            self._clock.move(spent, phase)
            self._clock.move({"imports": self._clock.seconds[phase]}, phase)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, node: Node) -> None:
        """A recipe is carried out when it is saved."""
        phase = "saving" if node.short_name == "train_model" else _phase_of(node)
        self._clock.mark("pictures" if dataset_name.endswith("_figure") else phase)

    @hook_impl(wrapper=True)
    def after_pipeline_run(self, pipeline: Pipeline) -> Iterator[None]:
        """MLflow gets the seconds so far: sending takes some more."""
        self._clock.mark("rest")
        if record := self._tracking.record:
            found = self._clock.seconds.items()
            record.figures |= {f"time/{k}_s": v for k, v in found if v >= SHOWN_S}
        try:
            return (yield)
        finally:
            self._clock.mark("tracking")
            if pipeline.all_outputs() != {"predictions"}:
                Console(stderr=True, width=WIDTH).print(table(self._clock.seconds))


def _phase_of(node: Node) -> str:
    """By the pipeline that has the node; one of one's own has its module's name."""
    *_, name, last = ("", *node.func.__module__.split("."))
    pipeline = name if last == "nodes" else last
    return OF_PIPELINE.get(pipeline, pipeline)
