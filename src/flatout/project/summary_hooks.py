"""What a command ends with: figures, the model, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from rich.console import Console
from rich.text import Text

from flatout.reports.summary import summary_lines

PLACES = {"model": "model", "report": "train_report"}


class SummaryHooks:
    """Ends a training or an evaluation with its figures, its model and what is next."""

    @hook_impl
    def before_pipeline_run(self) -> None:
        self._reports: dict[str, Any] = {}

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        for name in ("train_report", "evaluation_report"):
            if name in outputs:
                self._reports[name] = outputs[name]

    @hook_impl(wrapper=True)
    def after_pipeline_run(
        self, run_params: dict[str, Any], catalog: DataCatalog
    ) -> Iterator[None]:
        found = yield
        if self._reports:
            lines = summary_lines(
                self._reports.get("train_report"),
                self._reports.get("evaluation_report"),
                {name: _place(catalog, entry) for name, entry in PLACES.items()},
                run_params["env"],
            )
            Console(stderr=True).print(Text("\n".join(lines)), soft_wrap=True)
        return found


def _place(catalog: DataCatalog, entry: str) -> str:
    """Below the working directory, where it is there."""
    path = catalog.get(entry)._describe().get("filepath", "")
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
