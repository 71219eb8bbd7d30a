"""Tables, lists and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
"""By heading: the name of a field, or a function from a row to its text."""


def table(rows: Iterable[Row], columns: Columns) -> str:
    """Return a table with one line per row."""
    lines = [[_cell(row, column) for column in columns.values()] for row in rows]
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in [list(columns), ["---"] * len(columns), *lines]
    )


def _cell(row: Row, column: str | Callable[[Row], str]) -> str:
    return cell_text(row[column]) if isinstance(column, str) else column(row)


def times(name: str) -> Callable[[Row], str]:
    """Return a column of ratios."""
    return lambda row: times_text(row[name])


def percent(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Return a column of percents."""
    return lambda row: f"{scale * row[name]:.1f} %" if number_text(row[name]) else ""


def fixed(name: str, digits: int) -> Callable[[Row], str]:
    """Return a column with this number of decimal places."""
    return lambda row: number_text(row[name], digits)


def section(title: str, *parts: str) -> str:
    """Return parts of a page under a heading; empty ones are left out."""
    return "\n\n".join([f"## {title}", *filter(None, parts)])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def counted(count: float, noun: str) -> str:
    """Return `1 trial` or `3 trials`."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"


def times_text(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}x"


def cell_text(value: Any) -> str:
    if value is None or isinstance(value, float):
        return number_text(value)
    return str(value).replace("|", "/")


def time_text(hours: float | None) -> str:
    """Return `0.616 s`, `2 min` or `1.2 h`."""
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
