"""Terminal output of a benchmark: one line per trial."""

from __future__ import annotations

import logging
import signal

from rich.console import Console

from flatout.engine.benchmark.search import Search, search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.reports.report import TRIALS

logger = logging.getLogger(__name__)

PHASES = (
    *("I/O ms", "forward ms", "backward ms", "optimizer ms", "total ms"),
    *("GPU %", "memory GiB"),
)
"""The headings of the figures in a trial's line, in order."""


def search_watched(settings: Settings, files: JobFiles) -> Search:
    """Run the benchmark and print a line for each trial. On Ctrl-C, the trials measured
    so far are kept and Interrupted is raised."""
    try:
        return search(settings, files, show_trial)
    except KeyboardInterrupt as error:
        logger.warning(
            "Interrupted: the measured trials are kept; the same command continues "
            "with the rest"
        )
        raise Interrupted(signal.SIGINT) from error


def show_trial(trial: TrialResult) -> None:
    line = f"[{int(trial.trial_id)}] {trial_line(trial)}"
    Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)


def trial_line(trial: TrialResult) -> str:
    """Return one line with a trial's status, settings, throughput, phases and note."""
    rate = trial.samples_per_s or trial.loader_samples_per_s
    figures = f"{rate:,.1f} samples/s" if rate else ""
    if trial.times_below is not None:
        figures += f", {trial.times_below:.2f}x the reference"
    found = [(*head.split(), getattr(trial, TRIALS[head])) for head in PHASES]
    phases = ", ".join(f"{n} {v:,.1f} {unit}" for n, unit, v in found if v is not None)
    figures = "; ".join(filter(None, (figures, phases)))
    settings = (
        f"batch {trial.global_batch_size}",
        f"{trial.strategy}/{trial.token_budget}",
        f"{trial.num_workers} workers",
    )
    label = trial.label or trial.kind
    new = [text for text in settings if text not in label.split(", ")]
    return f"{trial.status:7} {', '.join([label, *new])}  {figures}  {trial.note}"
