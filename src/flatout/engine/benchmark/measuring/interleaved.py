"""Interleaved A/B: a window of one configuration, then a window of the other.

A host's speed changes by a third within minutes; adjacent windows change together, and
their ratio is stable. Each configuration has a separate process, because TF32, cuDNN's
choice and SDPA's kernels are switches of a process.
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
    """The baseline measured no window."""

    status = "unpaired"
    """Status of the trial that was paired with it."""


@dataclass(frozen=True)
class InterleavedPair:
    """A window, and one of the baseline directly before or after it."""

    window: Window
    baseline: Window

    @property
    def clean(self) -> bool:
        """Return whether neither window contains a compilation."""
        return self.window.clean and self.baseline.clean

    @property
    def ratio(self) -> float:
        return rate(self.window) / rate(self.baseline)


@dataclass
class Baseline:
    """The compared configuration, in a separate process (`measure.baseline`)."""

    process: psutil.Popen
    connection: Connection

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of this method of `WarmTraining`. Raises BaselineError."""
        with suppress(OSError):  # it has ended: the missing answer shows it
            self.connection.send((method, arguments))
        return self.answer()

    def answer(self) -> Any:
        """Read the next answer; the first is "warm". Raises BaselineError."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            status = self._status()
            text = f"the reference ended with status {status}: see this trial's log"
            raise BaselineError(text) from None

    def end(self) -> None:
        """End the baseline and its workers, by a call without a method."""
        with suppress(OSError):  # it has ended
            self.connection.send(None)
        self._status()

    def _status(self) -> int:
        """Return the exit status of the process, which is about to end."""
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except psutil.TimeoutExpired:  # it loads, or hangs
            self.process.kill()
            return self.process.wait()


@contextmanager
def baseline_of(spec: TrialSpec, folder: Path) -> Iterator[Baseline | None]:
    """Start the baseline at once, with the trial's data in a sub-folder of `folder`, so
    that it loads while this process does; end it when the block ends. Yield None if the
    spec has no `below`."""
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
    """At least `repeats` pairs, up to 2 * repeats + 1 if ratios vary. The first side
    alternates, so that a slowing host does not bias the ratio."""
    _same_blocks(warm, baseline)
    pairs: list[InterleavedPair] = []
    while not _enough(pairs, warm.measure.repeats):
        first = len(pairs) % 2 == 0
        pairs.append(_pair(warm, baseline, first=first))
    return steady(pairs)


def _enough(pairs: list[InterleavedPair], repeats: int) -> bool:
    ratios = [pair.ratio for pair in pairs if pair.clean]
    return enough(ratios, len(pairs), repeats)


def middle_half_pct(ratios: list[float]) -> float:
    """Return the spread of the middle half of the ratios over their median, in percent:
    a short pause of the host spoils a pair, not the median."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return float(100 * (high - low) / middle)


def _same_blocks(warm: WarmTraining, baseline: Baseline) -> None:
    """Use the same rows on both sides: those that fit the slower one's windows. Each
    side is timed while the other rests."""
    baseline.answer()
    slower_s = max(warm.time_step(), baseline.ask("time_step"))
    steps = block_steps(warm.measure, slower_s)
    warm.shorten(steps)
    baseline.ask("shorten", steps)


def _pair(warm: WarmTraining, baseline: Baseline, *, first: bool) -> InterleavedPair:
    below = None if first else baseline.ask("window_after_rest")
    window = warm.window_after_rest()
    return InterleavedPair(window, below or baseline.ask("window_after_rest"))
