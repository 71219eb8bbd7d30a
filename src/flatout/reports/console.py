"""Terminal output of a benchmark: a line for each trial, the table and the findings."""

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

from flatout.engine.benchmark.search import Search, search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.reports.markdown import counted
from flatout.reports.report import findings_text, trials_text

logger = logging.getLogger(__name__)

PHASES = (
    ("I/O", "io_ms", "ms"),
    ("forward", "forward_ms", "ms"),
    ("backward", "backward_ms", "ms"),
    ("optimizer", "optimizer_ms", "ms"),
    ("total", "total_ms", "ms"),
    ("GPU", "gpu_util_pct", "%"),
    ("memory", "reserved_memory_gib", "GiB"),
)
"""The columns shown in the line of a trial, in order."""


def show_findings(summary: Mapping[str, Any], steps: pd.DataFrame) -> None:
    """Print the findings of the report below the table, with the answer at the end."""
    wide = _wide(Console(stderr=True))
    wide.print(Markdown(findings_text(summary, steps)))
    wide.print()
    wide.print(Text(summary["answer"], style="bold"))


def _wide(console: Console) -> Console:
    """Return a wide console if the output is a file, which has no limit of width."""
    return console if console.is_terminal else Console(file=console.file, width=200)


def search_watched(settings: Settings, files: JobFiles) -> Search:
    """Run the benchmark and show a table of its trials. On Ctrl-C it raises Interrupted
    and keeps the trials measured so far."""
    shown = TrialTable()
    try:
        return search(settings, files, shown.add)
    except KeyboardInterrupt as error:
        logger.warning(
            "Interrupted: %s done; the same command continues with the rest",
            counted(len(shown.trials), "trial"),
        )
        raise Interrupted(signal.SIGINT) from error
    finally:
        shown.end()


@dataclass
class TrialTable:
    """Prints each trial of a benchmark as a line, and the whole table at the end."""

    console: Console = field(default_factory=lambda: Console(stderr=True))
    trials: list[TrialResult] = field(default_factory=list)

    def add(self, trial: TrialResult) -> None:
        self.trials.append(trial)
        line = f"[{len(self.trials)}] {trial_line(trial)}"
        self.console.print(line, soft_wrap=True, highlight=False)

    def end(self) -> None:
        if self.trials:
            rows = [trial.as_row() for trial in self.trials]
            _wide(self.console).print(Markdown(trials_text(rows)))


def trial_line(trial: TrialResult) -> str:
    """Return one line with the status, settings, rates, phases and note of a trial."""
    rate = trial.samples_per_s or trial.loader_samples_per_s
    figures = f"{rate:,.1f} samples/s" if rate else ""
    if trial.times_below is not None:
        figures += f", {trial.times_below:.2f}x the reference"
    found = [(name, getattr(trial, column), unit) for name, column, unit in PHASES]
    phases = ", ".join(f"{n} {v:,.1f} {unit}" for n, v, unit in found if v is not None)
    figures = "; ".join(filter(None, (figures, phases)))
    settings = (
        f"batch {trial.global_batch_size}",
        f"{trial.strategy}/{trial.token_budget}",
        f"{trial.num_workers} workers",
    )
    label = trial.label or trial.kind
    new = [text for text in settings if text not in label.split(", ")]
    return f"{trial.status:7} {', '.join([label, *new])}  {figures}  {trial.note}"
