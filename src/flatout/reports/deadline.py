"""Check from the log of a training of any program whether it will end in time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from flatout.engine.parameters import SettingsError

DAY_S = 86_400.0
_N = r"(\d[\d,]*)"
_KEY = r"(?:global[_ ]?step|\bstep|\biter(?:ation)?|\bbatch)s?\b\W{0,4}"
_STEP = re.compile(
    rf"{_KEY}{_N}(?:\s*(?:/|of)\s*{_N})?|(?<!epoch )[|\[]\s*{_N}\s*/\s*{_N}", re.I
)
_EPOCH = re.compile(rf"\bepoch\b\W{{0,4}}{_N}\s*(?:/|of)\s*{_N}", re.I)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_CLOCK = re.compile(r"(?:^|\[|\d )(?:(\d+):)?(\d\d):(\d\d)(?=[<\W])")
_UNIT = r"\s*(?:/|per\b|an?\b)\s*(?:it|iter(?:ation)?|batch|step)\b"
_MS = re.compile(rf"(\d*\.?\d+)\s*ms(?:{_UNIT}|[)\s]*$)", re.I)
_S_PER = re.compile(rf"(\d*\.?\d+)\s*s{_UNIT}", re.I)
_PER_S = re.compile(r"(\d*\.?\d+)\s*(?:it|iters?|batch(?:es)?|steps?)\s*/\s*s", re.I)
_JSON_KEYS = {
    "step": ("step", "global_step", "_step", "iteration"),
    "total": ("max_steps", "total_steps"),
    "time_s": ("time_s", "timestamp", "_timestamp", "time", "_runtime"),
}


@dataclass
class Run:
    """The newest run of a log."""

    number: int
    done: int = 0
    total: int | None = None
    times_s: list[tuple[int, float]] = field(default_factory=list)
    """(step, time) of the lines with both."""
    stated_s: list[float] = field(default_factory=list)
    """Seconds of a step, if lines state them."""

    @property
    def clock_s(self) -> float | None:
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
            line = _parsed(text)
            step, total = line.get("step"), line.get("total")
            is_short = total and run.total and total < run.total
            if step is None or (is_short and not epoch):  # the bar of an evaluation
                continue
            if total and epoch:
                step += (_number(epoch[1]) - 1) * total
                total *= _number(epoch[2])
            if not run.number or step < run.done:
                run = Run(run.number + 1)
            run.done, run.total = step, total or run.total
            run.stated_s += [line["stated_s"]] if line.get("stated_s") else []
            if (time_s := line.get("time_s")) is not None:
                before_s = run.times_s[-1][1] if run.times_s else time_s
                midnights = -(-max(0.0, before_s - time_s) // DAY_S)
                run.times_s.append((step, time_s + DAY_S * midnights))
    if not run.number:
        raise SettingsError(
            f"{path}: no line with a step, as `step 100/1000`, `[100/1000]`, a bar of "
            'tqdm or {"step": 100} in JSON lines; give the log of a training'
        )
    return run


def _parsed(text: str) -> Mapping[str, Any]:
    """Return `step`, `total`, `time_s` and `stated_s` of a line, if it has them."""
    if text.lstrip().startswith("{"):
        try:
            record = json.loads(text)
        except ValueError:  # a dictionary of Python, or a line that was cut
            return {}
        return {
            name: record[key]
            for name, keys in _JSON_KEYS.items()
            for key in reversed(keys)
            if isinstance(record.get(key), int | float)
        }
    line: dict[str, Any] = {"time_s": _time_s(text)}
    if found := _STEP.search(text):
        numbers = [_number(number) for number in found.groups() if number]
        line |= dict(zip(("step", "total"), numbers, strict=False))
    for pattern, scale, power in ((_MS, 1e-3, 1), (_S_PER, 1, 1), (_PER_S, 1, -1)):
        if (found := pattern.search(text)) and float(found[1]):
            return {**line, "stated_s": scale * float(found[1]) ** power}
    return line


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _time_s(text: str) -> float | None:
    """Return the time in seconds since 1970, midnight or the start."""
    if date := _DATE.search(text):
        with suppress(ValueError):  # no date of the calendar
            parts = map(int, date.groups())
            return datetime(*parts).timestamp()  # type: ignore[arg-type]
    if clock := _CLOCK.search(text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 3600.0 * hours + 60 * minutes + seconds
    return None


def deadline_lines(path: Path, hours: float, steps: int | None = None) -> list[str]:
    """Return lines, the answer first. `hours`: allowed in total; `steps`: in total, if
    the log does not state them. Raises SettingsError that names missing data."""
    run = newest_run(path)
    total, stated = steps or run.total, run.stated_s
    if total is None:
        raise SettingsError(
            f"{path}: the last step is {run.done:,}, none says of how many: "
            "give --steps"
        )
    step_s = run.clock_s or (median(stated) if stated else None)
    if step_s is None:
        raise SettingsError(
            f"{path}: found steps ({run.done:,} of {total:,}), but no times and no "
            "rate, as 145 ms or 6.8 batch/s: give a log that has either"
        )
    whole_h, left_h = (n * step_s / 3600 for n in (total, max(0, total - run.done)))
    answer = f"In time: {whole_h:,.1f} h in all, of {hours:g} h."
    if whole_h > hours:
        answer = (
            f"Too slow: {whole_h:,.1f} h in all where {hours:g} h are allowed; it has "
            f"to be {whole_h / hours:.2f} times as fast. kedro run "
            "--pipelines=benchmark shows what can be gained."
        )
    source = "by the log's clock, pauses included" if run.clock_s else "as stated"
    return [
        answer,
        f"{run.done:,} of {total:,} steps are done, {left_h:,.1f} h are left at "
        f"{1000 * step_s:,.1f} ms a step, {source}; run {run.number} of the log.",
    ]
