"""Predict from the log of any training whether it will end in time."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from flatout.engine.parameters import SettingsError

DAY_S = 86_400.0
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
    """The newest run of a log; `times_s` has (step, time) of the lines with both."""

    number: int
    done: int = 0
    total: int | None = None
    times_s: list[tuple[int, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step by the log's clock, with the pauses between steps."""
        ends = self.times_s[:1] + self.times_s[-1:] or [(0, 0.0)] * 2
        (first, begin), (last, end) = ends
        return (end - begin) / (last - first) if last > first and end > begin else None


def newest_run(path: Path) -> Run:
    """A decreasing step begins another run. Raises SettingsError without any step."""
    if not path.is_file():
        raise SettingsError(f"{path} is no file: give the log of a training")
    run, epoch = Run(0), None
    with path.open(errors="replace") as file:  # bars of tqdm end by \r
        for text in file:
            epoch = _EPOCH.search(text) or epoch
            found = _STEP.search(text)
            numbers = [_number(n) for n in found.groups() if n] if found else []
            step, total = (*numbers, None, None)[:2]
            is_short = total and run.total and total < run.total
            if step is None or (is_short and not epoch):  # the bar of an evaluation
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
            "bar of tqdm; give the log of a training"
        )
    return run


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _time_s(text: str) -> float | None:
    """Return the time in seconds since 1970, midnight or the start."""
    if date := _DATE.search(text):
        with suppress(ValueError):  # no date of the calendar
            return datetime.fromisoformat(date[0]).timestamp()
    if clock := _CLOCK.search(text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 3600.0 * hours + 60 * minutes + seconds
    return None


def deadline_lines(path: Path, hours: float, steps: int | None = None) -> list[str]:
    """Return lines, the answer first. `hours`: allowed in total; `steps`: in total, if
    the log does not state them. Raises SettingsError that names missing data."""
    run = newest_run(path)
    total, step_s = steps or run.total, run.step_s
    if total is None or step_s is None:
        lacks = "the number of steps: give --steps" if total is None else "times"
        raise SettingsError(f"{path}: the last step is {run.done:,}; it lacks {lacks}")
    whole_h, left_h = (n * step_s / 3600 for n in (total, max(0, total - run.done)))
    answer = f"In time: {whole_h:,.1f} h in all, of {hours:g} h."
    if whole_h > hours:
        answer = (
            f"Too slow: {whole_h:,.1f} h in all, allowed are {hours:g} h; it has to be "
            f"{whole_h / hours:.2f} times as fast. kedro run --pipelines=benchmark "
            "shows what can be gained."
        )
    return [
        answer,
        f"{run.done:,} of {total:,} steps are done, {left_h:,.1f} h are left at "
        f"{1000 * step_s:,.1f} ms a step; run {run.number} of the log.",
    ]
