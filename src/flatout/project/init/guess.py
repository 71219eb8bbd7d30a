"""A first guess of the meaning of a file's columns, for people to check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engine.data.columns import listed
from flatout.engine.data.raw_texts import RawTexts, RawTextsError
from flatout.project.init.first_look import (
    MOST_CLASSES,
    SAMPLED_ROWS,
    WORD,
    ColumnValues,
    FirstLook,
    Guessed,
    are_prose,
    are_texts,
    look_at,
)
from flatout.project.init.forms import BY_LABEL, BY_ROWS, UNLABELLED

SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test"}
LABELS = ("label", "labels", "class", "category", "target", "score", "rating", "tags")
SPLIT_COLUMNS = ("split", "partition", "subset", "fold", "set")
PIECES_PER_WORD = 1.4
"""Average number of a tokenizer's pieces per word, or per other sign."""

Told = tuple[str, Guessed]
"""Name of a task, and the columns that it reads."""


@dataclass(frozen=True)
class Guess:
    """Values of `model.task`, `split` and `tokenize.max_length`, and the reason."""

    task: str
    split: dict[str, Any]
    max_length: int
    why: str


def guess(raw: RawTexts, text: str | None = None, label: str | None = None) -> Guess:
    """Guess from names and values of the first rows; `text`, `label`: columns that the
    user has named. Raises RawTextsError if they are missing or contain no text."""
    look = look_at(raw)
    columns = look.columns
    for name in (text, label):
        if name is not None and name not in columns:
            raise RawTextsError(
                f"no column {name!r} with values in the first {SAMPLED_ROWS:,} rows; "
                f"there are {listed(list(columns))}"
            )
    if found := None if text or label else _by_form(look):
        task, own = found
        return Guess(task, own.split, _length(own.texts), own.why)
    return _by_label(columns, text, label)


def _by_form(look: FirstLook) -> Told | None:
    """Match rows whose form only one task has."""
    found = ((name, guessed(look)) for name, guessed in BY_ROWS)
    return next(((name, own) for name, own in found if own), None)


def _by_label(columns: ColumnValues, text: str | None, label: str | None) -> Guess:
    text = text or _longest_prose({n: v for n, v in columns.items() if n != label})
    rest = {name: values for name, values in columns.items() if name != text}
    split: dict[str, Any] = {"text_column": text}
    if column := _split_column({n: v for n, v in rest.items() if n != label}):
        split["split_column"] = column
        del rest[column]
    task, own = _told_by(rest, label) if label else _told(rest) or _unlabelled()
    length = _length([str(value) for value in columns[text]])
    return Guess(task, split | own.split, length, f"{text} is the text, {own.why}")


def _longest_prose(columns: ColumnValues) -> str:
    prose = {n: v for n, v in columns.items() if are_texts(v) and are_prose(v)}
    if not prose:
        raise RawTextsError(
            f"no column looks like text; there are {listed(list(columns))}: name it "
            "with --text-column; a table of numbers is read by kedro run --env=arrays "
            "--params=arrays.path=FILE"
        )
    return max(prose, key=lambda n: sum(map(len, prose[n])) / len(prose[n]))


def _told_by(rest: ColumnValues, label: str) -> Told:
    """Raises RawTextsError if the column does not contain labels."""
    found = _told({label: rest[label]}) if label in rest else None
    if found is None:
        raise RawTextsError(
            f"{label!r} is no column of labels: it is the text, or holds neither "
            f"numbers nor at most {MOST_CLASSES} classes of several rows each"
        )
    return found


def _told(rest: ColumnValues) -> Told | None:
    """Match by the name of a column, else by its values."""
    usual = [n for n in rest if n.strip().casefold() in LABELS]
    for names in (usual, [n for n in rest if n not in usual]):
        own = {name: rest[name] for name in names}
        found = ((name, guessed(own)) for name, guessed in BY_LABEL)
        if told := next(((name, one) for name, one in found if one), None):
            return told
    return None


def _unlabelled() -> Told:
    return UNLABELLED, Guessed({"label_column": None}, "no column a label")


def _split_column(rest: ColumnValues) -> str | None:
    for name, values in rest.items():
        found = {str(value).strip().casefold() for value in values}
        if name.strip().casefold() in SPLIT_COLUMNS and found <= SPLIT_NAMES:
            return name
    return None


def _length(texts: Sequence[str]) -> int:
    """Approximate 99th percentile of tokens per text; a multiple of 32."""
    words = sorted(len(WORD.findall(text)) for text in texts)
    most = words[math.ceil(0.99 * len(words)) - 1] * PIECES_PER_WORD + 2
    return min(512, 32 * math.ceil(most / 32))
