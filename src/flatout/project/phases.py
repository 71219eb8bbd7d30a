"""Where the time of a command went: a clock of named phases that Kedro's hooks turn.

One phase runs at any time, so that all of them add up to the wall time since the
process began. What a training spent, here or in its ranks, its report says.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import click
import psutil
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console
from rich.table import Table

from flatout.engine.files.owner import start_ticks
from flatout.places import use_project
from flatout.project.hooks import TrackingHooks
from flatout.project.parameters.hooks import TRAINING_NODES, loader_of

logger = logging.getLogger(__name__)

OF_PIPELINE = {
    **dict.fromkeys(("split", "tokenize", "arrays", "images"), "data"),
    "evaluate": "evaluation",
}
MODEL_ENTRIES = frozenset({"model", "tokenizer", "model_tokenizer", "tokenizer_file"})
PHASES = {
    "imports": "interpreter and imports",
    "configuration": "configuration",
    "data": "data",
    "model": "model and tokenizer",
    "compilation": "compilation",
    "first_step": "first step",
    "steps": "steps",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "tracking": "tracking",
    "pictures": "pictures",
    "saving": "saving",
    "rest": "rest",
}
"""In the order of the table; phases of other pipelines have the pipeline's name."""
WIDTH = 100
NOTHING_S = 1e-6


class PhaseClock:
    """Seconds by phase; what falls into none is `rest`."""

    def __init__(self, phase: str, since_s: float) -> None:
        """`since_s`: when `phase` began, as time.perf_counter counts."""
        self._phase, self._since_s = phase, since_s
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, now_s: float | None = None) -> None:
        """End the phase that runs, and begin `phase`."""
        now_s = time.perf_counter() if now_s is None else now_s
        self._add(self._phase, now_s - self._since_s)
        self._phase, self._since_s = phase, now_s

    def move(self, source: str, parts: Mapping[str, float]) -> None:
        """Seconds of `source`, which has ended, that were spent in other phases."""
        for phase, seconds in parts.items():
            self._add(phase, seconds)
            self._add(source, -seconds)

    def seconds(self) -> dict[str, float]:
        """By phase, up to now; they add up to the wall time."""
        self.enter(self._phase)
        spent = {k: v for k, v in self._seconds.items() if abs(v) > NOTHING_S}
        first = [name for name in PHASES if name in spent]
        order = dict.fromkeys([*first, *(spent.keys() - {"rest"}), "rest"])
        return {name: spent.get(name, 0.0) for name in order}

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


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
        share = 100 * spent_s / wall_s
        result.add_row(PHASES.get(name, name), f"{spent_s:.2f}", f"{share:.1f}")
    return result


class PhaseHooks:
    """Turns the clock. Wraps all other hooks: what they take is `tracking`."""

    def __init__(self, tracking: TrackingHooks) -> None:
        self._tracking = tracking
        self._clock = PhaseClock("rest", time.perf_counter())

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """The process is the command's where a command line started it; a notebook's
        is not, and the clock begins with the configuration. This hook is the first of
        all: what the next ones read is of this session's project."""
        use_project(context.project_path)
        created_s = loader_of(context).created_s
        begin_s = time.perf_counter() - process_age_s()
        is_command = click.get_current_context(silent=True) is not None
        self._clock = PhaseClock("imports", begin_s if is_command else created_s)
        self._clock.enter("configuration", created_s)

    @hook_impl(wrapper=True)
    def before_pipeline_run(self) -> Iterator[None]:
        yield
        self._clock.enter("rest")

    @hook_impl
    def before_dataset_loaded(self, dataset_name: str, node: Node) -> None:
        if node.name in TRAINING_NODES:
            self._clock.enter("imports")  # else they would be the node's
            import_module("flatout.engine.launch.launch")
        self._clock.enter("model" if dataset_name in MODEL_ENTRIES else "data")

    @hook_impl
    def after_dataset_loaded(self) -> None:
        self._clock.enter("rest")

    @hook_impl(wrapper=True)
    def before_node_run(self, node: Node) -> Iterator[None]:
        self._clock.enter("tracking")
        found = yield
        self._clock.enter(_phase_of(node))
        return found

    @hook_impl(wrapper=True)
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> Iterator[None]:
        self._clock.enter("tracking")
        found = yield
        if node.name == "train_model":
            if not self._tracking.reused:
                self._clock.move("train", outputs["train_report"]["phases_s"])
            self._clock.move("train", {"rest": self._clock.seconds().get("train", 0)})
        self._clock.enter("rest")
        return found

    @hook_impl
    def before_dataset_saved(self, dataset_name: str, node: Node) -> None:
        """A recipe is carried out where it is saved."""
        is_figure = dataset_name.endswith("_figure")
        phase = "saving" if node.name == "train_model" else _phase_of(node)
        self._clock.enter("pictures" if is_figure else phase)

    @hook_impl
    def after_dataset_saved(self) -> None:
        self._clock.enter("rest")

    @hook_impl(wrapper=True)
    def after_pipeline_run(
        self, pipeline: Pipeline, catalog: DataCatalog
    ) -> Iterator[None]:
        """The last that MLflow gets are the seconds so far: sending takes some more."""
        self._clock.enter("tracking")
        outbox, forwarder = self._tracking.outbox, self._tracking.forwarder
        if outbox is not None:
            found = self._clock.seconds()
            outbox.record.figures |= {f"time/{k}_s": v for k, v in found.items()}
        try:
            return (yield)
        finally:
            if forwarder is not None:
                self._clock.move("tracking", {"pictures": forwarder.pictures_s})
            trains = "train_report" in pipeline.all_outputs()
            if trains and not self._tracking.reused:  # it keeps what training it took
                self._complete(catalog)
            if pipeline.all_outputs() != {"predictions"}:
                Console(stderr=True, width=WIDTH).print(table(self._clock.seconds()))

    def _complete(self, catalog: DataCatalog) -> None:
        """The train report's phases become those of the whole command."""
        self._clock.enter("saving")
        entry = catalog.get("train_report")
        try:
            found = self._clock.seconds()
            entry.save({**entry.load(), "phases_s": found})
        except Exception as error:  # an entry with versions takes one save a run
            logger.debug("train_report has the training's phases alone: %s", error)


def _phase_of(node: Node) -> str:
    """By the pipeline that has the node; one of one's own has its module's name."""
    *_, name, last = ("", *node.func.__module__.split("."))
    pipeline = name if last == "nodes" else last
    return OF_PIPELINE.get(pipeline, pipeline)
