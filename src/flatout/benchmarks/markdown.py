"""Tables, lists and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

Line = Sequence[Any]


def table(head: Line, lines: Iterable[Line]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell) for cell in row) + " |" for row in rows
    )


def bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def counted(count: float, noun: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"


def times_text(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}x"


def percent_text(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None or pd.isna(value) else f"{scale * value:.1f} %"


def cell_text(value: Any) -> str:
    if value is None or isinstance(value, float):
        return number_text(value)
    return str(value).replace("|", "/")


def time_text(hours: float | None) -> str:
    """`0.616 s`, `2 min` or `1.2 h`."""
    if hours is None:
        return ""
    seconds = 3600 * hours
    if seconds < 60:
        return f"{number_text(seconds)} s"
    if seconds < 3600:
        return f"{number_text(seconds / 60)} min"
    return f"{number_text(hours)} h"


def number_text(value: float | None, digits: int | None = None) -> str:
    if value is None or pd.isna(value):
        return ""
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
