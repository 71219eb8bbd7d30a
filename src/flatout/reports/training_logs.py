"""Steps and times in the log of any training: plain lines, tqdm's bars, JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

HEAD_BYTES, TAIL_BYTES = 1 << 20, 56 << 20
"""Read of a larger file: its newest run ends in the tail, and its head may be the only
place that says of how many steps."""
BLOCK_BYTES = 1 << 20
DAY_S = 86_400.0

_COUNT = r"(\d[\d,]*)"
_STEP = re.compile(
    rf"(?:global[_ ]?step|\bstep|\biter(?:ation)?|\bbatch)s?\b\W{{0,4}}{_COUNT}"
    rf"(?:\s*(?:/|of)\s*{_COUNT})?",
    re.IGNORECASE,
)
_BAR = re.compile(rf"\|\s*{_COUNT}/{_COUNT} \[(?:(\d+):)?(\d+):(\d+)<")
_BRACKET = re.compile(
    rf"(?<!epoch )(?<!epoch: )\[\s*{_COUNT}\s*/\s*{_COUNT}\s*\]", re.I
)
_EPOCH = re.compile(rf"\bepoch\b\W{{0,4}}{_COUNT}\s*(?:/|of)\s*{_COUNT}", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_US_DATE = re.compile(r"(\d\d)/(\d\d)/(\d{4}|\d\d)\s+(\d\d):(\d\d):(\d\d)")
_CLOCK = re.compile(r"^\W{0,3}(\d\d):(\d\d):(\d\d)\b")
_MS = re.compile(r"([\d.]+)\s*ms\b", re.IGNORECASE)
_WORDS_BEFORE = re.compile(r"[^\d]*$")
_WORD_AFTER = re.compile(r"\s+[a-z]+(?!\w*\W{0,3}\d)", re.IGNORECASE)
_OF_STEP_BEFORE = re.compile(
    r"\b(?:it|iter(?:ation)?|batch|step)[ _]?(?:time|took|ms)\b", re.IGNORECASE
)
_OF_STEP_AFTER = re.compile(
    r"\s*(?:/|per\b|an?\b)\s*(?:it|iter(?:ation)?|batch|step)\b", re.IGNORECASE
)
_NOT_OF_STEP = re.compile(
    r"(?:^|[^a-z])(?:data|load|wait|fetch|io|i/o|forward|backward|fwd|bwd|optim|eval"
    r"|val|test|ping|latency|compil|warm)",
    re.IGNORECASE,
)
_PER_S = re.compile(r"([\d.]+)\s*(?:it|iters?|batch(?:es)?|steps?)\s*/\s*s", re.I)
_S_PER = re.compile(r"([\d.]+)\s*s\s*/\s*(?:it|iter|batch|step)\b", re.IGNORECASE)
_STEP_KEYS = ("step", "global_step", "_step", "iteration", "iter")
_TIME_KEYS = ("time_s", "timestamp", "_timestamp", "time", "elapsed_s", "_runtime")


@dataclass(frozen=True)
class LogLine:
    """What a line says of a training; None: nothing."""

    step: int | None = None
    total: int | None = None
    epoch: tuple[int, int] | None = None
    """Which of how many."""
    time_s: float | None = None
    """Since 1970, since the start, or since midnight."""
    step_s: float | None = None
    """As the line states it."""
    is_bar: bool = False
    """Of tqdm, which evaluations have too."""


@dataclass(frozen=True)
class Log:
    """Lines that say something."""

    lines: Iterator[LogLine]
    left_out: int = 0
    """Bytes before them that were not read: another run may have ended there."""
    first_total: int | None = None
    """Steps, as the head of a file says whose middle was not read."""


def read_log(path: Path) -> Log:
    """The last line of a file that is still written may be cut: what it says whole
    counts."""
    size = path.stat().st_size
    left_out = size - HEAD_BYTES - TAIL_BYTES
    if left_out <= 0:
        return Log(_lines(path))
    with path.open("rb") as file:
        head = list(_parsed(file.read(HEAD_BYTES)))
    total = next((line.total for line in head if line.total), None)
    return Log(_lines(path, size - TAIL_BYTES), left_out, total)


def _lines(path: Path, begin: int = 0) -> Iterator[LogLine]:
    """From the first whole line behind `begin` on."""
    with path.open("rb") as file:
        file.seek(begin)
        rest, is_cut = b"", begin > 0
        while block := file.read(BLOCK_BYTES):
            whole, rest = _at_last_end(rest + block)
            if is_cut and whole:
                _, whole = re.split(rb"[\r\n]", whole, maxsplit=1)
                is_cut = False
            yield from _parsed(whole)
        yield from _parsed(rest)


def _at_last_end(block: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and the begin of the next. Bars of tqdm end by \\r alone; what has
    no end for so long is no line of a log."""
    end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    rest = block[end:]
    return block[:end], rest if len(rest) <= BLOCK_BYTES else b""


def _parsed(block: bytes) -> Iterator[LogLine]:
    for text in re.split(r"[\r\n]+", block.decode("utf-8", errors="replace")):
        found = parse_line(text)
        if found != LogLine():
            yield found


def parse_line(text: str) -> LogLine:
    """What is known of one line."""
    if text.lstrip().startswith("{"):
        try:
            return _of_record(json.loads(text))
        except (ValueError, TypeError):
            pass  # a dictionary of Python, or a cut line: read as text
    line = _of_text(text)
    epoch = _EPOCH.search(text)
    if epoch:
        line = replace(line, epoch=(_number(epoch[1]), _number(epoch[2])))
    return line


def _of_record(record: dict[str, Any]) -> LogLine:
    step = next((record[k] for k in _STEP_KEYS if _is_number(record.get(k))), None)
    time_s = next((record[k] for k in _TIME_KEYS if _is_number(record.get(k))), None)
    total = next((record[k] for k in ("max_steps", "total_steps") if k in record), None)
    return LogLine(
        None if step is None else int(step),
        int(total) if _is_number(total) else None,
        time_s=None if time_s is None else float(time_s),
    )


def _of_text(text: str) -> LogLine:
    bar = _BAR.search(text)
    if bar:
        hours, minutes, seconds = (int(part or 0) for part in bar.groups()[2:])
        elapsed_s = 3600.0 * hours + 60 * minutes + seconds
        steps = _number(bar[1]), _number(bar[2])
        return LogLine(*steps, None, elapsed_s, _rate(text), is_bar=True)
    found = _STEP.search(text) or _BRACKET.search(text)
    step, total = (found[1], found[2]) if found else (None, None)
    return LogLine(
        None if step is None else _number(step),
        None if total is None else _number(total),
        time_s=_time(text),
        step_s=_rate(text),
    )


def _rate(text: str) -> float | None:
    """Seconds a step."""
    try:
        if (ms := _step_ms(text)) is not None:
            return ms / 1000
        if found := _S_PER.search(text):
            return float(found[1])
        if found := _PER_S.search(text):
            return 1 / float(found[1])
    except (ValueError, ZeroDivisionError):
        pass
    return None


def _step_ms(text: str) -> float | None:
    """The milliseconds that are named a step's, else the only ones that are not named
    a part of it or something beside it; the words around a figure name it."""
    bare = []
    for found in _MS.finditer(text):
        before = _WORDS_BEFORE.search(text[: found.start()])
        after = _WORD_AFTER.match(text[found.end() :])
        named = f"{before[0] if before else ''} {after[0] if after else ''}"
        if _NOT_OF_STEP.search(named):
            continue
        if _OF_STEP_BEFORE.search(named) or _OF_STEP_AFTER.match(text[found.end() :]):
            return float(found[1])
        bare.append(float(found[1]))
    return bare[0] if len(bare) == 1 else None


def _time(text: str) -> float | None:
    try:
        if found := _DATE.search(text):
            *parts, fraction = found.groups()
            seconds = datetime(*map(int, parts)).timestamp()  # type: ignore[arg-type]
            return seconds + float(f"0.{fraction or 0}")
        if found := _US_DATE.search(text):
            month, day, year, *clock = map(int, found.groups())
            year += 2000 if year < 100 else 0
            return datetime(year, month, day, *clock).timestamp()
    except ValueError:
        return None
    found = _CLOCK.search(text)
    return None if found is None else _seconds(*map(int, found.groups()))


def _seconds(hours: int, minutes: int, seconds: int) -> float:
    return 3600.0 * hours + 60 * minutes + seconds


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
