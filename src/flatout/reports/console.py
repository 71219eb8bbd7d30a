"""A benchmark in the terminal: one line per trial, the table and the findings."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from flatout.engine.benchmark.runner import Watcher
from flatout.engine.benchmark.search import Search, search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.reports.columns import CONSOLE, columns_of
from flatout.reports.markdown import counted
from flatout.reports.report import findings_text

logger = logging.getLogger(__name__)

STYLES = {"ok": "green", "oom": "yellow"}
"""Colours by status; other statuses are red."""


def table(trials: Sequence[TrialResult], best: str | None = None) -> Table:
    """Return a table with one row per trial; that of `best` (a trial_id) is marked."""
    shown = columns_of(CONSOLE, [trial.as_row() for trial in trials])
    result = Table(header_style="bold", box=None)
    result.add_column("trial")
    for head in shown:
        result.add_column(head, justify="right", no_wrap=True)
    result.add_column("status")
    result.add_column("", overflow="fold")
    for trial in trials:
        chosen = trial.trial_id == best
        result.add_row(
            f"{'> ' if chosen else '  '}{trial.trial_id}",
            *(_cell(getattr(trial, name), name) for name in shown.values()),
            Text(trial.status, STYLES.get(trial.status, "red")),
            "; ".join(part for part in (trial.label, trial.note) if part),
            style="bold green" if chosen else None,
        )
    return result


def _cell(value: object, name: str = "") -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "times_below":
        return f"{value:.2f}x"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return str(value)


def show_findings(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> None:
    """Print the page's findings below the table; the answer is last."""
    target = Console(stderr=True)
    width = target.width if target.is_terminal else 160
    wide = Console(file=target.file, width=width)
    wide.print(Markdown(findings_text(summary, trials, steps)))
    wide.print()
    wide.print(Text(summary["answer"], style="bold"))


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


def fastest(trials: Sequence[TrialResult]) -> str | None:
    """Return the trial_id of the highest end-to-end rate; None without a rate."""
    rated = [t for t in trials if t.ok and t.kind == "end_to_end" and t.samples_per_s]
    best = max(rated, key=lambda trial: trial.rate, default=None)
    return best.trial_id if best else None


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
            # A file has no limit of width.
            width = self.console.width if self.console.is_terminal else 200
            shown = Console(file=self.console.file, width=width)
            shown.print(table(self.trials, fastest(self.trials)))

    def expect(self, trials: int) -> None:
        self.expected = trials

    def expect_more(self, trials: int) -> None:
        self.expected += trials

    def ends(self, trial: TrialResult) -> None:
        self.trials.append(trial)
        self.console.print(self._line(trial), soft_wrap=True, highlight=False)

    @property
    def left(self) -> str:
        """Return `about 3:10 left`; empty after the planned number of trials, because
        the number of further ones is unknown. Based on each trial's duration, also in
        the interrupted benchmark before this one."""
        done = len(self.trials)
        if not 0 < done < self.expected:
            return ""
        mean_s = sum(trial.elapsed_s for trial in self.trials) / done
        left_s = int(mean_s * (self.expected - done))
        return f"about {left_s // 60}:{left_s % 60:02d} left"

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
        left = f"  ({self.left})" if self.left else ""
        return (
            f"[{done}{total}] {trial.status:7} {', '.join([label, *new])}  {shown}  "
            f"{trial.note}{left}"
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
