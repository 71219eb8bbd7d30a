"""A benchmark in the terminal: one line per trial, the table and the findings."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from flatout.engine.benchmark.runner import Watcher
from flatout.engine.benchmark.search import Search, search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.reports.comparisons import trials_text
from flatout.reports.markdown import counted
from flatout.reports.report import findings_text

logger = logging.getLogger(__name__)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return str(value)


def show_findings(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> None:
    """Print the page's findings below the table; the answer is last."""
    wide = _wide(Console(stderr=True))
    wide.print(Markdown(findings_text(summary, trials, steps)))
    wide.print()
    wide.print(Text(summary["answer"], style="bold"))


def _wide(console: Console) -> Console:
    """Return a wide console for a file, which has no limit of width."""
    if console.is_terminal:
        return console
    return Console(file=console.file, width=200)


def search_watched(settings: Settings, files: JobFiles) -> Search:
    """Run the benchmark with a table of its trials. Raises Interrupted on Ctrl-C;
    measured trials are kept."""
    try:
        with TrialTable() as table:
            return search(settings, files, table)
    except KeyboardInterrupt as error:
        logger.warning(
            "Interrupted: %s done; the same command goes on with the rest",
            counted(len(table.trials), "trial"),
        )
        raise Interrupted(signal.SIGINT) from error


@dataclass
class TrialTable(Watcher):
    """Print each trial of a benchmark as a line, and the table at the end."""

    console: Console = field(default_factory=lambda: Console(stderr=True))
    trials: list[TrialResult] = field(default_factory=list)
    expected: int = 0

    def __enter__(self) -> TrialTable:
        return self

    def __exit__(self, *_: object) -> None:
        if self.trials:
            rows = [trial.as_row() for trial in self.trials]
            _wide(self.console).print(Markdown(trials_text(rows)))

    def expect(self, trials: int) -> None:
        self.expected = trials

    def expect_more(self, trials: int) -> None:
        self.expected += trials

    def ends(self, trial: TrialResult) -> None:
        self.trials.append(trial)
        self.console.print(self._line(trial), soft_wrap=True, highlight=False)

    def _line(self, trial: TrialResult) -> str:
        done = len(self.trials)
        total = f"/{self.expected}" if done <= self.expected else ""
        rate = trial.samples_per_s or trial.loader_samples_per_s
        shown = f"{rate:,.1f} samples/s" if rate else ""
        if trial.times_below is not None:
            shown += f", {trial.times_below:.2f}x what stands below"
        shown = "; ".join(part for part in (shown, _phases(trial)) if part)
        label = trial.label or trial.kind
        words = (
            f"batch {trial.global_batch_size}",
            f"{trial.strategy}/{trial.token_budget}",
            f"{trial.num_workers} workers",
        )
        new = [word for word in words if word not in label.split(", ")]
        return (
            f"[{done}{total}] {trial.status:7} {', '.join([label, *new])}  {shown}  "
            f"{trial.note}"
        )


PHASES = (
    ("I/O", "io_ms", "ms"),
    ("forward", "forward_ms", "ms"),
    ("backward", "backward_ms", "ms"),
    ("optimizer", "optimizer_ms", "ms"),
    ("total", "total_ms", "ms"),
    ("GPU", "gpu_util_pct", "%"),
    ("memory", "reserved_memory_gib", "GiB"),
)
"""Columns of a trial's line, in this order."""


def _phases(trial: TrialResult) -> str:
    """Return the measured ones of `I/O 2.1 ms, forward 38.0 ms, ...`."""
    found = [(name, getattr(trial, field), unit) for name, field, unit in PHASES]
    told = [f"{name} {_cell(v)} {unit}" for name, v, unit in found if v is not None]
    return ", ".join(told)
