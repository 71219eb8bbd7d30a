"""The table of trials in the terminal, while they run and at the end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from flatout.engine.benchmark.search import Search, search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.benchmark.trials.watching import Watcher
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.reports.answer import chart
from flatout.reports.columns import CONSOLE, columns_of
from flatout.reports.markdown import counted
from flatout.reports.report import findings_text

logger = logging.getLogger(__name__)

MARKS = {
    "ok": Text("ok", style="green"),
    "oom": Text("oom", style="yellow"),
    "error": Text("error", style="red"),
    "timeout": Text("timeout", style="red"),
    "unpaired": Text("unpaired", style="red"),
    "runs": Text("runs", style="cyan"),
}


def table(
    trials: Sequence[TrialResult], best: str | None = None, title: str | None = None
) -> Table:
    """Aligned, a line a trial; the line of `best` (a trial_id) is marked."""
    shown = columns_of(CONSOLE, [trial.as_row() for trial in trials])
    result = Table(title=title, title_justify="left", header_style="bold", box=None)
    result.add_column("trial")
    for head in shown:
        result.add_column(head, justify="right", no_wrap=True)
    result.add_column("status")
    result.add_column("", overflow="fold")
    for trial in trials:
        cells = [_shown(trial, name) for name in shown.values()]
        mark = MARKS.get(trial.status, Text(trial.status))
        chosen = trial.trial_id == best
        remark = "; ".join(part for part in (trial.label, trial.note) if part)
        result.add_row(
            f"{'> ' if chosen else '  '}{trial.trial_id}",
            *cells,
            mark,
            remark,
            style="bold green" if chosen else None,
        )
    return result


def _shown(trial: TrialResult, name: str) -> str:
    value = getattr(trial, name)
    if name == "times_below" and value is not None:
        return f"{value:.2f}x"
    return _cell(value)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return str(value)


def show_findings(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> None:
    """The page's findings below the table; the answer stands last."""
    target = Console(stderr=True)
    width = target.width if target.is_terminal else 160
    wide = Console(file=target.file, width=width)
    wide.print(Markdown(findings_text(summary, trials, steps)))
    wide.print()
    wide.print(Text(summary["answer"], style="bold"))
    wide.print(Text(chart(summary, steps)))


def search_watched(settings: Settings, files: JobFiles) -> Search:
    """Run the benchmark under a table of its trials. Raises Interrupted on Ctrl-C: what
    was measured is kept."""
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
    """trial_id of the highest end-to-end rate; None where there is none."""
    rated = [t for t in trials if t.ok and t.kind == "end_to_end" and t.samples_per_s]
    best = max(rated, key=lambda trial: trial.rate, default=None)
    return best.trial_id if best else None


@dataclass
class TrialTable(Watcher):
    """Watches a benchmark. In a terminal the table grows in place; elsewhere each trial
    is a line, and the table stands at the end."""

    console: Console = field(default_factory=lambda: Console(stderr=True))
    trials: list[TrialResult] = field(default_factory=list)
    expected: int = 0
    _running: TrialResult | None = None
    _begin_s: float = field(default_factory=time.perf_counter)
    _live: Live | None = None
    _ended: bool = False

    def __enter__(self) -> TrialTable:
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, refresh_per_second=2, get_renderable=self._view
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running, self._ended = None, True
        if self._live is not None:
            self._live.stop()
        elif self.trials:
            # A file is as wide as its longest line.
            Console(file=self.console.file, width=200).print(self._view())

    def expect(self, trials: int) -> None:
        self.expected = trials

    def expect_more(self, trials: int) -> None:
        self.expected += trials

    def begins(self, trial: TrialResult) -> None:
        self._running = trial
        self._show()

    def ends(self, trial: TrialResult) -> None:
        self._running = None
        self.trials.append(trial)
        self._show()
        if self._live is None:
            self.console.print(self._line(trial), soft_wrap=True, highlight=False)

    def _show(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _view(self) -> RenderableType:
        lines = list(self.trials)
        if self._running:
            lines.append(replace(self._running, status="runs"))
        if self._ended:
            return table(lines, fastest(self.trials))
        return Group(table(lines, fastest(self.trials)), Text(self.progress))

    @property
    def progress(self) -> str:
        """`trial 3 of 12, 1:20 so far, about 3:10 left`."""
        number, spent_s = len(self.trials) + 1, time.perf_counter() - self._begin_s
        total = f" of {self.expected}" if number <= self.expected else ""
        left = f", {self._left}" if self._left else ""
        return f"trial {number}{total}, {_clock(spent_s)} so far{left}"

    @property
    def _left(self) -> str:
        """`about 3:10 left`; empty where as many are done as were planned: those that
        still come nobody has counted. By what each trial took, also in the benchmark
        that was cut short and left it."""
        done = len(self.trials)
        if not 0 < done < self.expected:
            return ""
        mean_s = sum(trial.elapsed_s for trial in self.trials) / done
        return f"about {_clock(mean_s * (self.expected - done))} left"

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
        left = f"  ({self._left})" if self._left else ""
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
"""Of a trial's line, in guide E's order."""


def _phases(trial: TrialResult) -> str:
    """`I/O 2.1 ms, forward 38.0 ms, ...`: what was measured of these."""
    found = [(name, getattr(trial, field), unit) for name, field, unit in PHASES]
    told = [f"{name} {_cell(v)} {unit}" for name, v, unit in found if v is not None]
    return ", ".join(told)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
