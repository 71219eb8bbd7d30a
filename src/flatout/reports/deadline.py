"""Predict from the log of any training program whether it will finish in time."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from flatout.engine.parameters import SettingsError

DAY_S = 86_400.0
TIMES = "two steps with different times"
_N = r"(\d[\d,]*)(?!\.?\d)"
_KEY = r"(?:global[_ ]?step|\bstep|\biter(?:ation)?|\bbatch)s?\b\W{0,4}"
_STEP = re.compile(
    rf"{_KEY}{_N}(?:\s*(?:/|of)\s*{_N})?|(?<!epoch )[|\[]\s*{_N}\s*/\s*{_N}", re.I
)
_EPOCH = re.compile(rf"\bepoch\b\W{{0,4}}{_N}\s*(?:/|of)\s*{_N}", re.I)
_DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_CLOCK = re.compile(r"(?:^|\[|\d )(?:(\d+):)?(\d\d):(\d\d)(?=[<\W])")


@dataclass
class Run:
    """A run in a log: its number in the log (counted from 1), its last step, its total
    number of steps if known, and (step, time in seconds) pairs."""

    number: int
    done: int = 0
    total: int | None = None
    times_s: list[tuple[int, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        """Seconds per step, including pauses between steps. The value is None if fewer
        than two steps were timed."""
        ends = self.times_s[:1] + self.times_s[-1:] or [(0, 0.0)] * 2
        (first, begin), (last, end) = ends
        return (end - begin) / (last - first) if last > first and end > begin else None


def newest_run(path: Path) -> Run:
    """Return the newest run in the log at `path`. A new run starts where the step
    number decreases. Raises SettingsError if no line has a step."""
    if not path.is_file():
        raise SettingsError(f"{path} is not a file: give the log of a run")
    run, epoch = Run(0), None
    with path.open(errors="replace") as file:  # tqdm ends its bars with \r
        for text in file:
            epoch = _EPOCH.search(text) or epoch
            found = _STEP.search(text)
            numbers = [_number(n) for n in found.groups() if n] if found else []
            step, total = (*numbers, None, None)[:2]
            is_short = total and run.total and total < run.total
            if step is None or (is_short and not epoch):  # an evaluation's progress bar
                continue
            if total and epoch:
                step += (_number(epoch[1]) - 1) * total
                total *= _number(epoch[2])
            if not run.number or step < run.done:
                run = Run(run.number + 1)
            run.done, run.total = step, total or run.total
            if (time_s := _time_s(text)) is not None:
                before_s = run.times_s[-1][1] if run.times_s else time_s
                midnights = -(-max(0.0, before_s - time_s) // DAY_S)
                run.times_s.append((step, time_s + DAY_S * midnights))
    if not run.number:
        raise SettingsError(
            f"{path}: no line with a step, such as `step 100/1000`, `[100/1000]` or a "
            "tqdm bar; give the log of a run"
        )
    return run


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _time_s(text: str) -> float | None:
    """Return the time in a line of the log, in seconds since 1970, midnight or the
    start of the run, or None if the line has no time."""
    if date := _DATE.search(text):
        with suppress(ValueError):  # not a valid date
            return datetime.fromisoformat(date[0]).timestamp()
    if clock := _CLOCK.search(text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 3600.0 * hours + 60 * minutes + seconds
    return None


def deadline_lines(path: Path, hours: float, steps: int | None = None) -> list[str]:
    """Return the lines to print, beginning with the prediction. `hours` is the total
    time allowed. `steps` is the total number of steps, which is needed if the log does
    not contain it. Raises SettingsError if the log lacks steps or times."""
    run = newest_run(path)
    total, step_s = steps or run.total, run.step_s
    if total is None or step_s is None:
        lacks = "the number of steps: give --steps" if total is None else TIMES
        raise SettingsError(f"{path}: the last step is {run.done:,}; it lacks {lacks}")
    whole_h, left_h = (n * step_s / 3600 for n in (total, max(0, total - run.done)))
    answer = f"In time: the run takes {whole_h:,.1f} h of {hours:g} h."
    if whole_h > hours:
        answer = (
            f"Too slow: the run takes {whole_h:,.1f} h, but only {hours:g} h are "
            f"allowed. It has to be {whole_h / hours:.2f} times as fast. kedro run "
            "--pipelines=benchmark shows what can be gained."
        )
    return [
        answer,
        f"{run.done:,} of {total:,} steps are done, {left_h:,.1f} h are left at "
        f"{1000 * step_s:,.1f} ms a step; run {run.number} of the log.",
    ]
