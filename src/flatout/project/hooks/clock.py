"""The clock around all other hooks, and the summary at the end of a command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console
from rich.text import Text

from flatout.project.hooks.run import Run
from flatout.project.phases import SHOWN_S, begun, phase_of, table
from flatout.reports.summary import summary_lines

WIDTH = 100
PLACES = {"model": "model", "report": "train_report"}


class ClockHooks:
    """Record seconds by phase; show them at the end, with the figures, the model and
    the next command."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @hook_impl(wrapper=True)
    def before_pipeline_run(self) -> Iterator[Any]:
        self._clock = begun(self._run.loader.created_s)
        self._reports: dict[str, Any] = {}
        result = yield
        self._clock.mark("configuration")
        return result

    @hook_impl
    def before_node_run(self) -> None:
        """Book the seconds in which Kedro has loaded the node's inputs."""
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
            self._clock.move(spent, phase)
            self._clock.move({"imports": self._clock.seconds[phase]}, phase)
        return result

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, node: Node) -> None:
        """Book the time of the save, which also carries out a recipe."""
        phase = "saving" if node.short_name == "train_model" else phase_of(node)
        self._clock.mark("pictures" if dataset_name.endswith("_figure") else phase)

    @hook_impl(wrapper=True)
    def after_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> Iterator[Any]:
        """Send the seconds so far to MLflow: sending needs some more."""
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
                Console(stderr=True, width=WIDTH).print(table(self._clock.seconds))
        if self._reports:
            self._show_summary(run_params["env"])
        return result

    def _show_summary(self, env: str | None) -> None:
        lines = summary_lines(
            self._reports.get("train_report"),
            self._reports.get("evaluation_report"),
            {name: self._place(entry) for name, entry in PLACES.items()},
            env,
            self._run.settings.train.metric,
        )
        Console(stderr=True).print(Text("\n".join(lines)), soft_wrap=True)

    def _place(self, entry: str) -> str:
        """Return the path relative to the working directory, if it is below it."""
        known = self._run.loader["catalog"].get(entry, {})
        path = self._run.context.project_path / known.get("filepath", "")
        in_sight = path.is_relative_to(Path.cwd())
        return str(path.relative_to(Path.cwd()) if in_sight else path)
