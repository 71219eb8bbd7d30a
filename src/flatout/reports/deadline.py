"""Whether the training of a log, of whatever program, will be done in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from flatout.engine.parameters import SettingsError
from flatout.reports.training_logs import DAY_S, LogLine, read_log

PAUSES = 1.1
"""A step by the clock over a step as stated, from which pauses are told of."""

STOPPED_S = 3600.0
STOPPED_GAPS = 50
"""The longest time between two lines is taken for a stop (killed, and resumed later)
where it is longer, and as many times the median, and no second one is half as long:
evaluations return."""


@dataclass
class _Run:
    """The newest run of a log, so far."""

    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Of those steps that had one, as `timed`."""
    timed: list[int] = field(default_factory=list)
    stated_s: list[float] = field(default_factory=list)
    total: int | None = None


@dataclass(frozen=True)
class Projection:
    """Of the newest run. Steps of `step_s` seconds, pauses included where the log has
    times; `stated_s` is what its own lines say of a step."""

    runs: int
    done: int
    total: int
    step_s: float
    stated_s: float | None
    by_clock: bool
    stopped_s: float = 0.0
    """Between a kill and the resume; not counted."""

    @property
    def whole_h(self) -> float:
        return self.total * self.step_s / 3600

    @property
    def left_h(self) -> float:
        return (self.total - self.done) * self.step_s / 3600


def project(path: Path, total: int | None = None) -> tuple[Projection, int]:
    """Of the newest run in the log at `path`, and bytes that were not read. `total`:
    its steps, where the log does not say. Raises SettingsError with what was found."""
    if not path.is_file():
        raise SettingsError(f"{path} is no file: give the log of a training")
    log = read_log(path)
    runs, run = _newest_run(log.lines)
    counted = f"{path}: found {len(run.steps):,} lines with a step"
    if not run.steps:
        raise SettingsError(
            f"{path}: no line with a step, as `step 100/1000`, `[100/1000]`, a bar of "
            'tqdm or {"step": 100} in JSON lines; give the log of a training'
        )
    total = total or run.total or log.first_total
    if total is None:
        raise SettingsError(
            f"{counted}, the last is {run.steps[-1]:,}, none says of how many: give "
            "--steps"
        )
    stopped_s = _stopped_s(run)
    by_clock = _by_clock(run, stopped_s)
    stated = median(run.stated_s) if run.stated_s else None
    step_s = by_clock or stated
    if step_s is None:
        raise SettingsError(
            f"{counted} ({run.steps[-1]:,} of {total:,}), but no times and no rate, as "
            "145 ms or 6.8 batch/s: give a log that has either"
        )
    done = min(run.steps[-1], total)
    found = Projection(
        runs, done, total, step_s, stated, by_clock is not None, stopped_s
    )
    return found, log.left_out


def _newest_run(lines: Iterable[LogLine]) -> tuple[int, _Run]:
    """How many runs there are, and the last one: steps that fall begin another."""
    runs, run = 0, _Run()
    epoch: tuple[int, int] | None = None
    for line in lines:
        epoch = line.epoch or epoch
        if line.step is None:
            continue
        step, total = _overall(line.step, line.total, epoch)
        if line.is_bar and (total or 0) < (run.total or 0):
            continue  # a shorter bar beside the training's: an evaluation
        if not run.steps or step < run.steps[-1]:
            runs, run = runs + 1, _Run()
            epoch = line.epoch
            step, total = _overall(line.step, line.total, epoch)
        run.steps.append(step)
        run.total = total or run.total
        if line.time_s is not None:
            run.timed.append(step)
            run.times_s.append(_after(run.times_s, line.time_s))
        if line.step_s is not None:
            run.stated_s.append(line.step_s)
    return runs, run


def _overall(
    step: int, total: int | None, epoch: tuple[int, int] | None
) -> tuple[int, int | None]:
    """Step and steps of all epochs, where those of an epoch are counted."""
    if total is None or epoch is None:
        return step, total
    number, count = epoch
    return (number - 1) * total + step, count * total


def _after(times_s: list[float], time_s: float) -> float:
    """A clock without a date begins again at midnight."""
    if times_s and time_s < times_s[-1] and time_s < DAY_S:
        time_s += DAY_S * -(-(times_s[-1] - time_s) // DAY_S)
    return time_s


def _stopped_s(run: _Run) -> float:
    """What one gap took beyond its steps, where it stands alone."""
    passed = [b - a for a, b in pairwise(run.times_s)]
    steps = [b - a for a, b in pairwise(run.timed)]
    rates = [s / n for s, n in zip(passed, steps, strict=True) if n]
    if len(rates) < 3:
        return 0.0
    step_s = median(rates)
    gaps = sorted(s - n * step_s for s, n in zip(passed, steps, strict=True))
    least = max(STOPPED_S, STOPPED_GAPS * median(passed), 2 * gaps[-2])
    return gaps[-1] if gaps[-1] > least else 0.0


def _by_clock(run: _Run, stopped_s: float) -> float | None:
    """Seconds a step between the first and the last line with a time."""
    if len(run.timed) < 2 or run.timed[-1] <= run.timed[0]:
        return None
    passed_s = run.times_s[-1] - run.times_s[0] - stopped_s
    return passed_s / (run.timed[-1] - run.timed[0]) if passed_s > 0 else None


def deadline_lines(found: Projection, hours: float, left_out: int) -> list[str]:
    """The answer first."""
    factor = found.whole_h / hours
    if factor <= 1:
        answer = f"In time: {found.whole_h:,.1f} h in all, of {hours:g} h."
    else:
        answer = (
            f"Too slow: {found.whole_h:,.1f} h in all where {hours:g} h are allowed; "
            f"it has to be {factor:.2f} times as fast."
        )
    source = "by the log's clock" if found.by_clock else "as the log states it"
    lines = [
        answer,
        f"{found.done:,} of {found.total:,} steps are done, {found.left_h:,.1f} h are "
        f"left at {1000 * found.step_s:,.1f} ms a step, {source}.",
    ]
    stated = found.stated_s
    if found.by_clock and stated and found.step_s > PAUSES * stated:
        lines.append(
            f"The log states {1000 * stated:,.1f} ms a step: the rest of the time went "
            "into what stands between steps (evaluation, checkpoints, logging)."
        )
    if found.stopped_s:
        lines.append(
            f"One gap of {found.stopped_s / 3600:,.1f} h is taken for a stop and not "
            "counted; where it was an evaluation, the rest takes longer than this says."
        )
    if found.runs > 1:
        lines.append(
            f"The log has {found.runs} runs; these are the last one's figures."
        )
    if left_out:
        lines.append(
            f"{left_out / 2**20:,.0f} MiB in its middle were not read, in which other "
            "runs may have ended: these figures are those of the steps behind."
        )
    if factor > 1:
        lines.append(
            "What may gain that: kedro run --pipelines=benchmark, then "
            "kedro run --env=tuned."
        )
    return lines
