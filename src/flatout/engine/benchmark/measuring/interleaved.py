"""Interleaved A/B measurements, in which windows of two configurations alternate.

The speed of a host can change by a third within minutes. Adjacent windows are affected
equally, so the ratio of their throughput is stable. Each configuration has its own
process, because TF32, cuDNN benchmarking and the SDPA kernels are set per process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flatout.engine.benchmark.measuring.windows import (
    WarmTraining,
    block_steps,
    enough,
    rate,
)
from flatout.engine.benchmark.trials.processes import command, write_spec
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.environment import child_environment, training_environment
from flatout.engine.parameters import parse_settings
from flatout.engine.train.recording.timing import Window, steady

ENDS_WITHIN_S = 10.0


class BaselineError(RuntimeError):
    """Raised if the baseline process ends without sending a result."""

    status = "unpaired"
    """Status of the trial whose baseline failed."""


@dataclass(frozen=True)
class InterleavedPair:
    """A window of a trial, and the baseline's window directly before or after it."""

    window: Window
    baseline: Window

    @property
    def clean(self) -> bool:
        """Return whether nothing was compiled during either window."""
        return self.window.clean and self.baseline.clean

    @property
    def ratio(self) -> float:
        return rate(self.window) / rate(self.baseline)


@dataclass
class Baseline:
    """The reference configuration, running in its own process (`measure.baseline`)."""

    process: psutil.Popen
    connection: Connection

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the baseline's `WarmTraining` and return its result. Raises
        BaselineError if the process has ended."""
        with suppress(OSError):  # if the process has ended, `answer` raises the error
            self.connection.send((method, arguments))
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next message and return it. The first one, sent after the
        warm-up, is "warm". Raises BaselineError if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            status = self._status()
            text = f"the reference ended with exit code {status}: see this trial's log"
            raise BaselineError(text) from None

    def end(self) -> None:
        """Send None, which makes the baseline exit, and wait for its end."""
        with suppress(OSError):  # the process has already ended
            self.connection.send(None)
        self._status()

    def _status(self) -> int:
        """Wait for the process to end, and return its exit code. Kill the process if it
        does not end within ENDS_WITHIN_S."""
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except psutil.TimeoutExpired:  # the process is still loading, or it hangs
            self.process.kill()
            return self.process.wait()


@contextmanager
def baseline_of(spec: TrialSpec, folder: Path) -> Iterator[Baseline | None]:
    """Context manager that runs a trial's baseline in a process whose files are in a
    subfolder of `folder`. The process loads the model and data while the current
    process does the same. Yields None if the spec has no baseline (`below`)."""
    if "below" not in spec.options:
        yield None
        return
    ours, theirs = Pipe()
    below = parse_settings(spec.options["below"])
    settings = below.model_copy(update={"benchmark": spec.measure})
    options = {"connection": theirs.fileno()}
    asked = replace(spec, kind="baseline", settings=settings, options=options)
    stored = json.loads((folder / "spec.json").read_text())
    write_spec(asked, stored["job"], folder / "below")
    process = psutil.Popen(
        command(asked, folder / "below"),
        env=child_environment(training_environment(settings.runtime)),
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    baseline = Baseline(process, ours)
    try:
        yield baseline
    finally:
        baseline.end()


def interleave(warm: WarmTraining, baseline: Baseline) -> list[InterleavedPair]:
    """Measure `repeats` to 2 * `repeats` + 1 pairs of windows until their ratios agree.
    Return the pairs without compilation, or all pairs if there are none. The
    configurations take turns going first, so that a host that slows down does not bias
    the ratio."""
    _same_blocks(warm, baseline)
    pairs: list[InterleavedPair] = []
    ratios: list[float] = []
    while not enough(ratios, len(pairs), warm.measure.repeats):
        below = baseline.ask("window_after_rest") if len(pairs) % 2 else None
        window = warm.window_after_rest()
        below = below or baseline.ask("window_after_rest")
        pairs.append(InterleavedPair(window, below))
        ratios = [pair.ratio for pair in pairs if pair.clean]
    return steady(pairs)


def middle_half_pct(ratios: list[float]) -> float:
    """Return the interquartile range of `ratios` divided by their median, in percent.
    It ignores outliers, such as those caused by a short pause of the host."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return float(100 * (high - low) / middle)


def _same_blocks(warm: WarmTraining, baseline: Baseline) -> None:
    """Make both configurations use the same rows: as many as the slower one processes
    in a window. Each is timed while the other is idle."""
    baseline.answer()
    slower_s = max(warm.time_step(), baseline.ask("time_step"))
    steps = block_steps(warm.measure, slower_s)
    warm.shorten(steps)
    baseline.ask("shorten", steps)
