"""Markdown tables, sections and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
"""Maps each heading to a field name, or to a function that formats the row's cell."""


def table(rows: Iterable[Row], columns: Columns) -> str:
    """Return a Markdown table with one line per row."""
    lines = [
        [cell_text(row[c]) if isinstance(c, str) else c(row) for c in columns.values()]
        for row in rows
    ]
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in [list(columns), ["---"] * len(columns), *lines]
    )


def times(name: str) -> Callable[[Row], str]:
    """Return a column function that formats the field `name` as a ratio."""
    return lambda row: "" if pd.isna(row[name]) else f"{row[name]:.2f}x"


def section(title: str, *parts: str) -> str:
    """Return a Markdown section with a heading. Empty parts are left out."""
    return "\n\n".join([f"## {title}", *filter(None, parts)])


def counted(count: float, noun: str) -> str:
    """Return a count with its noun, such as `1 trial` or `3 trials`."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"


def cell_text(value: Any) -> str:
    if value is None or isinstance(value, float):
        return number_text(value)
    return str(value).replace("|", "/")


def time_text(hours: float | None) -> str:
    """Return a duration with its unit, such as `0.616 s`, `2 min` or `1.2 h`."""
    if hours is None:
        return ""
    for size, unit in ((1, "h"), (60, "min")):
        if hours * size >= 1:
            return f"{number_text(hours * size)} {unit}"
    return f"{number_text(3600 * hours)} s"


def number_text(value: float | None) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
