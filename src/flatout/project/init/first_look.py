"""The first rows of a file of raw texts and the form of their columns, from which tasks
guess whether the file fits them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engine.data.raw_texts import RawTexts, batches_of

SAMPLED_ROWS = 2000
MOST_CLASSES = 200
WORD = re.compile(r"\w+|[^\w\s]")
"""A word, or one other sign."""

ColumnValues = Mapping[str, Sequence[Any]]
"""Values by column."""


@dataclass(frozen=True)
class Guessed:
    """Values of `split` and the reason that people read."""

    split: dict[str, Any]
    why: str
    texts: Sequence[str] = ()
    """Texts that are tokenized, to measure their length; () for the text column."""


@dataclass(frozen=True)
class FirstLook:
    """Sampled rows, by column."""

    table: ColumnValues
    """One place for each row; None if it has no value."""

    @property
    def columns(self) -> ColumnValues:
        """Columns without missing values; empty columns are dropped."""
        known = {
            name: [value for value in values if value is not None]
            for name, values in self.table.items()
        }
        return {name: values for name, values in known.items() if values}

    def pairs(self, one: str, other: str) -> list[tuple[Any, Any]]:
        """Return the values of the rows that have both."""
        both = zip(self.table[one], self.table[other], strict=True)
        return [pair for pair in both if None not in pair]


def look_at(raw: RawTexts) -> FirstLook:
    """Read SAMPLED_ROWS rows; empty texts count as missing values."""
    names = list(dict.fromkeys(raw.column_names))
    found: dict[str, list[Any]] = {name: [] for name in names}
    rows = 0
    for batch in batches_of(raw, names):
        for name, values in batch.columns.items():
            kept = values[: SAMPLED_ROWS - rows].to_pylist()
            found[name] += [None if value == "" else value for value in kept]
        rows += len(batch.rows)
        if rows >= SAMPLED_ROWS:
            break
    return FirstLook({name: _parsed(values) for name, values in found.items()})


def names_are_a_row(raw: RawTexts) -> bool:
    """Return True if the header is missing: a column's name is one of its classes."""
    names = list(raw.column_names)
    if names == [str(n) for n in range(len(names))]:  # as pandas numbers columns
        return False
    return any(
        num_classes(values) and name in {str(value) for value in values}
        for name, values in look_at(raw).columns.items()
    )


def _parsed(values: list[Any]) -> list[Any]:
    """Parse columns in which every value is a JSON list: readers return text."""
    told = [value for value in values if value is not None]
    if not all_are(told, lambda v: isinstance(v, str) and v.startswith("[")):
        return values
    try:
        return [None if value is None else json.loads(value) for value in values]
    except ValueError:
        return values


def all_are(values: Sequence[Any], check: Callable[[Any], bool]) -> bool:
    return all(check(value) for value in values)


def are_texts(values: Sequence[Any]) -> bool:
    return all_are(values, lambda value: isinstance(value, str))


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and are_texts(value)


def are_prose(texts: Sequence[str]) -> bool:
    """Return True if half of the texts have several words or are long."""
    several = sum(len(WORD.findall(text)) > 2 or len(text) > 40 for text in texts)
    return 2 * several >= len(texts) and not all_are(texts, is_number)


def is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def num_classes(values: Sequence[Any]) -> int | None:
    """Count different values if they are few and whole or text; else None."""
    if not all_are(values, lambda value: isinstance(value, (str, int))):
        return None
    if any(not _is_whole(value) for value in values if is_number(value)):
        return None
    count = len({str(value) for value in values})
    return count if 2 <= count <= min(MOST_CLASSES, len(values) / 2) else None


def named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the first of `wanted` that is present, in any capitalisation."""
    known = {name.strip().casefold(): name for name in names}
    return next((known[name] for name in wanted if name in known), None)


def _is_whole(value: Any) -> bool:
    return float(value) == int(float(value)) and "." not in str(value)
