"""Measure the time of each phase, and print the summary at the end of a command."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import click
import psutil
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console
from rich.text import Text

from flatout.engine.files.writable import shown
from flatout.project.hooks.run import Run
from flatout.reports.summary import summary_lines

OF_PIPELINE = {
    **dict.fromkeys(("split", "tokenize", "arrays", "images"), "data"),
    "evaluate": "evaluation",
}
SHOWN_S = 0.005


class PhaseClock:
    """Stopwatch that adds up the seconds of each phase."""

    def __init__(self, since_s: float) -> None:
        """Start the first phase at `since_s`, a value of `time.perf_counter()`."""
        self._since_s = since_s
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def mark(self, phase: str, now_s: float | None = None) -> None:
        """Add the time since the last mark to `phase`. `now_s` is a time of
        `time.perf_counter`. The default is the current time."""
        now_s = time.perf_counter() if now_s is None else now_s
        self.seconds[phase] += now_s - self._since_s
        self._since_s = now_s


def process_age_s() -> float:
    """Return the seconds since this process started. On Linux, psutil's start time
    contains the boot time rounded to seconds. The boot time is therefore subtracted
    again."""
    created_s = psutil.Process().create_time()
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - created_s
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (created_s - psutil.boot_time())


def time_line(seconds: Mapping[str, float]) -> str:
    """Return a line with the total time and the seconds of each phase. Phases shorter
    than SHOWN_S are left out."""
    parts = ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if v >= SHOWN_S)
    return f"where {sum(seconds.values()):.1f} s went: {parts}"


def start_clock(created_s: float) -> PhaseClock:
    """Return a running clock. `created_s` is the time when the configuration loader was
    created. In a command, the phase `imports` lasts from the start of the process until
    then. In a notebook, the clock starts at `created_s`."""
    is_command = click.get_current_context(silent=True) is not None
    begin_s = time.perf_counter() - process_age_s() if is_command else created_s
    clock = PhaseClock(begin_s)
    clock.mark("imports", created_s)
    return clock


def phase_of(node: Node) -> str:
    """Return the phase of a node: the entry of its pipeline in OF_PIPELINE, or else the
    name of its pipeline."""
    pipeline = (node.namespace or node.short_name).rpartition(".")[2]
    return OF_PIPELINE.get(pipeline, pipeline)


PLACES = {"model": "model", "report": "train_report"}


class ClockHooks:
    """Hooks that measure the time of each phase. At the end, they print these times,
    the main metrics, the path of the model and the next command."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @hook_impl(wrapper=True)
    def before_pipeline_run(self) -> Iterator[Any]:
        self._clock = start_clock(self._run.loader.created_s)
        self._reports: dict[str, Any] = {}
        result = yield
        self._clock.mark("configuration")
        return result

    @hook_impl
    def before_node_run(self) -> None:
        """Record the time that Kedro took to load the node's inputs."""
        self._clock.mark("loading")

    @hook_impl(wrapper=True)
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> Iterator[Any]:
        phase = phase_of(node)
        self._clock.mark(phase)
        result = yield
        for name in ("train_report", "evaluation_report"):
            if name in outputs:
                self._reports[name] = outputs[name]
        if node.short_name == "train_model":
            spent = {} if self._run.reused else outputs["train_report"]["phases_s"]
            seconds = self._clock.seconds
            seconds["imports"] += seconds.pop(phase) - sum(spent.values())
            for part, part_s in spent.items():
                seconds[part] += part_s
        return result

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, node: Node) -> None:
        """Record the time that saving a dataset took, including the execution of its
        recipe."""
        phase = "saving" if node.short_name == "train_model" else phase_of(node)
        self._clock.mark("pictures" if dataset_name.endswith("_figure") else phase)

    @hook_impl(wrapper=True)
    def after_pipeline_run(self, pipeline: Pipeline) -> Iterator[Any]:
        """Add the times to the run's record before the tracking program sends it. Then
        print the times and the summary."""
        self._clock.mark("rest")
        if tracked := self._run.tracked:
            found = self._clock.seconds.items()
            tracked.record.figures |= {
                f"time/{k}_s": v for k, v in found if v > SHOWN_S
            }
        try:
            result = yield
        finally:
            self._clock.mark("tracking")
            if pipeline.all_outputs() != {"predictions"}:
                click.echo(time_line(self._clock.seconds), err=True)
        if self._reports:
            self._show_summary()
        return result

    def _show_summary(self) -> None:
        lines = summary_lines(
            self._reports.get("train_report"),
            self._reports.get("evaluation_report"),
            {name: self._place(entry) for name, entry in PLACES.items()},
            self._run.settings.train.metric,
            self._run.run_options,
            self._run.data_option,
        )
        Console(stderr=True).print(Text("\n".join(lines)), soft_wrap=True)

    def _place(self, entry: str) -> str:
        known = self._run.loader["catalog"].get(entry, {})
        return shown(self._run.context.project_path / known.get("filepath", ""))
