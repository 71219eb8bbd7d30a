"""What a command ends with: figures, the model, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from rich.console import Console
from rich.text import Text

from flatout.reports.summary import summary_lines

PLACES = {"model": "model", "report": "train_report"}


class SummaryHooks:
    """Ends a training or an evaluation with its figures, its model and what is next."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._context = context
        self._reports: dict[str, Any] = {}

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        for name in ("train_report", "evaluation_report"):
            if name in outputs:
                self._reports[name] = outputs[name]

    @hook_impl(wrapper=True)
    def after_pipeline_run(self, run_params: dict[str, Any]) -> Iterator[None]:
        found = yield
        if self._reports:
            lines = summary_lines(
                self._reports.get("train_report"),
                self._reports.get("evaluation_report"),
                {name: _place(self._context, e) for name, e in PLACES.items()},
                run_params["env"],
            )
            Console(stderr=True).print(Text("\n".join(lines)), soft_wrap=True)
        return found


def _place(context: KedroContext, entry: str) -> str:
    """Below the working directory, if it is there."""
    known = context.config_loader["catalog"].get(entry, {})
    path = context.project_path / known.get("filepath", "")
    in_sight = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if in_sight else path)
