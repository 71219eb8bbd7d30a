"""Guess the task and the columns of a data file. The user should check the result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engine.data.column_checks import value_of
from flatout.engine.data.columns import listed
from flatout.engine.data.forms import as_message
from flatout.engine.data.raw_texts import RawTexts, RawTextsError
from flatout.project.init.forms import FORMS, LOWEST_SCORE

SAMPLED_ROWS = 2000
MOST_CLASSES = 200
WORD = re.compile(r"\w+|[^\w\s]")
"""Matches a word or a single other character."""
WHOLE = re.compile(r"[-+]?\d+")
SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test"}
SPLIT_COLUMNS = ("split", "partition", "subset", "fold", "set")
TEXTS = ("text", "texts", "sentence", "content")
LABELS = ("label", "labels", "class", "category", "target", "score", "rating", "tags")
MISSING = {"n/a", "na", "nan", "null"}
ROW_NUMBERS = ("id", "index", "")
PIECES_PER_WORD = 1.4
"""Average number of tokens for each match of WORD."""

UNLABELLED = "masked-lm"

Values = Mapping[str, Sequence[Any]]
"""Maps each column name to the column's values."""
Labels = tuple[str, str | list[str] | None, str]
"""The task, the label column (or a list of columns of 0 and 1), and the reason."""


@dataclass(frozen=True)
class Guess:
    """The guessed `model.task`, `split` and `tokenize.max_length`, and the reason."""

    task: str
    split: dict[str, Any]
    max_length: int
    why: str


def guess(
    raw: RawTexts,
    text: str | None = None,
    label: str | None = None,
    task: str | None = None,
) -> Guess:
    """Guess the settings from the column names and the values of the first rows.
    `text`, `label` and `task` are the text column, the label column and the task if the
    user has given them. Raises RawTextsError if a given column is missing or if no
    column contains text."""
    columns = first_values(raw)
    for name in (text, label):
        if name is not None and name not in columns:
            raise RawTextsError(
                f"no column {name!r} with values in the first {SAMPLED_ROWS:,} rows; "
                f"there are {listed(list(columns))}"
            )
    own = None if text or label else next(_by_form(columns, task), None)
    return own or _by_label(columns, text, label)


def names_are_a_row(raw: RawTexts) -> bool:
    """Return whether the file seems to lack a header, so that its first row was
    mistaken for the column names."""
    names = list(raw.column_names)
    if names == [str(n) for n in range(len(names))]:  # pandas numbers columns like this
        return False
    return any(
        _num_classes(values) and name in {str(value) for value in values}
        for name, values in first_values(raw).items()
    )


def first_values(raw: RawTexts) -> dict[str, list[Any]]:
    """Return the non-empty values of the first SAMPLED_ROWS rows, keyed by column.
    Columns without values are left out."""
    names = list(dict.fromkeys(raw.column_names))
    found: dict[str, list[Any]] = {name: [] for name in names}
    rows = 0
    for batch in raw.batches(names):
        for name, values in batch.columns.items():
            part = map(value_of, values[: SAMPLED_ROWS - rows])
            found[name] += [value for value in part if _has_value(value)]
        rows += len(batch.rows)
        if rows >= SAMPLED_ROWS:
            break
    return {name: _parsed(values) for name, values in found.items() if values}


def _has_value(value: Any) -> bool:
    return value is not None and str(value).strip() != ""


def _parsed(values: list[Any]) -> list[Any]:
    """Return the values, parsed if all of them are JSON lists. Readers return lists as
    strings. Words for missing values, such as `N/A`, are left out of numbers and lists
    only, because among other labels such a word is a class."""
    given = [value for value in values if str(value).lower() not in MISSING]
    if all(map(_is_number, given)):
        return given or values
    if not all(isinstance(v, str) and v.startswith("[") for v in given):
        return values
    try:
        return [json.loads(value) for value in given]
    except ValueError:
        return values


def _by_form(columns: Values, wanted_task: str | None) -> Iterator[Guess]:
    """Yield a guess for each task in FORMS that matches the columns' names and values.
    If `wanted_task` is given, other tasks are skipped."""
    known = {name.strip().casefold(): name for name in columns}
    for task, wanted in FORMS:
        if wanted_task not in (None, task):
            continue
        split = {}
        for parameter, names in wanted.items():
            there = {known[n]: columns[known[n]] for n in names if n in known}
            if name := _first(there, lambda _, values, p=parameter: _fits(p, values)):
                split[parameter] = name
        missing = wanted.keys() - split.keys() - {"negative_column"}
        if missing or not _is_score(task, columns, split.get("label_column")):
            continue
        own = [name for p, name in split.items() if p != "label_column"]
        length = max(_length(list(map(_as_text, columns[name]))) for name in own)
        why = ", ".join(
            f"{name} is the {p.removesuffix('_column')}" for p, name in split.items()
        )
        yield Guess(task, {"label_column": None, **split}, length, why)


def _fits(parameter: str, values: Sequence[Any]) -> bool:
    """Return whether the values fit `parameter`, a column parameter in FORMS. Only
    completions may be numbers. Labels always fit, because `_is_score` checks them."""
    if parameter == "label_column":
        return True
    if parameter == "messages_column":
        return all(map(_is_chat, values))
    if parameter == "text_column":
        return all(map(_is_list_of_texts, values))
    are_texts = all(
        isinstance(value, str)
        or (parameter == "negative_column" and _is_list_of_texts(value))
        for value in values
    )
    is_answer = parameter == "completion_column"
    return are_texts and (is_answer or not all(map(_is_number, values)))


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict) and {"role", "content"} <= turn.keys()
        for turn in map(as_message, value)
    )


def _is_score(task: str, columns: Values, label: str | None) -> bool:
    """Return whether the labels in the column `label`, if there is one, fit the task.
    Sentence pairs whose labels are only 0 and 1 do not fit, because these labels are
    more likely classes than scores."""
    lowest = LOWEST_SCORE.get(task)
    if label is None or lowest is None:
        return label is None or all(map(_is_list_of_texts, columns[label]))
    if not all(_is_number(v) and lowest <= float(v) <= 1 for v in columns[label]):
        return False
    return task == "reranking" or not {float(v) for v in columns[label]} <= {0, 1}


def _as_text(value: Any) -> str:
    """Join the words of a list, or the contents of messages, into one text."""
    parts = map(as_message, value) if isinstance(value, list) else [value]
    return " ".join(str(p["content"] if isinstance(p, dict) else p) for p in parts)


def _by_label(columns: Values, text: str | None, label: str | None) -> Guess:
    text = text or _longest_prose({n: v for n, v in columns.items() if n != label})
    rest = {name: values for name, values in columns.items() if name != text}
    split: dict[str, Any] = {"text_column": text}
    if column := _split_column({n: v for n, v in rest.items() if n != label}):
        split["split_column"] = column
        del rest[column]
    found: Labels | None
    if label:
        rest = {label: rest[label]} if label in rest else {}
        found = _labels(rest)
    else:  # by the column name, or else by its values
        usual = {n: v for n, v in rest.items() if n.strip().casefold() in LABELS}
        rest = usual if _labels(usual) else rest
        found = _labels(rest) or (UNLABELLED, None, "no label")
    if found is None:
        raise RawTextsError(
            f"{label!r} is not a label column: it is the text, or contains neither "
            f"numbers nor at most {MOST_CLASSES} classes of several rows each"
        )
    task, own, why = found
    split |= {"label_columns": own} if isinstance(own, list) else {}
    split["label_column"] = None if isinstance(own, list) else own
    chosen = own if isinstance(own, list) else [own]
    others = [n for n, v in rest.items() if n not in chosen and _labels({n: v})]
    if others:
        why += f"; {listed(others)} may be labels too (--label-column)"
    length = _length([str(value) for value in columns[text]])
    return Guess(task, split, length, f"{text} is the text, {why}")


def _longest_prose(columns: Values) -> str:
    prose = {n: v for n, v in columns.items() if _are_prose(n, v)}
    if not prose:
        raise RawTextsError(
            f"no column looks like text; there are {listed(list(columns))}: name it "
            "with --text-column; a table of numbers is read by kedro run --env=arrays "
            "--params=arrays.path=FILE"
        )
    return max(prose, key=lambda n: sum(map(len, prose[n])) / len(prose[n]))


def _split_column(rest: Values) -> str | None:
    for name, values in rest.items():
        found = {str(value).strip().casefold() for value in values}
        if name.strip().casefold() in SPLIT_COLUMNS and found <= SPLIT_NAMES:
            return name
    return None


def _labels(columns: Values) -> Labels | None:
    """Return the task, the label column or columns, and the reason, or None if no
    column looks like labels."""
    first = _first(columns, lambda _, values: all(map(_is_list_of_texts, values)))
    task = "multi-label-classification"
    if first is not None:
        return task, first, f"{first} has lists of labels"
    flags = [n for n, v in columns.items() if {str(x) for x in v} == {"0", "1"}]
    if len(flags) > 1:
        return task, flags, f"{', '.join(flags)} are 0 or 1"
    first = _first(columns, lambda _, values: _num_classes(values))
    if first is not None:
        count, rows = _num_classes(columns[first]), len(columns[first])
        why = f"{first} has {count} classes in the first {rows:,} rows"
        return "sequence-classification", first, why
    first = _first(columns, _are_targets)
    return None if first is None else ("regression", first, f"{first} has numbers")


def _first(columns: Values, fits: Callable[[str, Sequence[Any]], Any]) -> str | None:
    return next((name for name, values in columns.items() if fits(name, values)), None)


def _are_targets(name: str, values: Sequence[Any]) -> bool:
    """Return whether the values are regression targets: numbers that are not row
    IDs."""
    is_id = name.strip().casefold() in ROW_NUMBERS or name.endswith("_id")
    return all(map(_is_number, values)) and not is_id


def _num_classes(values: Sequence[Any]) -> int | None:
    """Return the number of distinct values if they can be classes, i.e. if there are
    few and all are integers or strings. Otherwise, return None."""
    if not all(isinstance(value, (str, int)) for value in values):
        return None
    if any(_is_number(value) and not WHOLE.fullmatch(str(value)) for value in values):
        return None
    count = len({str(value) for value in values})
    return count if 2 <= count <= min(MOST_CLASSES, len(values) / 2) else None


def _are_prose(name: str, values: Sequence[Any]) -> bool:
    """Return whether at least half of the values are long or contain three words, or
    one word in a column with a usual name. Numbers are ignored, so a column of numbers
    with a few invalid cells is not mistaken for text."""
    if not all(isinstance(value, str) for value in values):
        return False
    others = [text for text in values if not _is_number(text)]
    least = 1 if name.strip().casefold() in TEXTS else 3
    several = sum(len(WORD.findall(t)) >= least or len(t) > 40 for t in others)
    return 2 * several >= len(values)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def _length(texts: Sequence[str]) -> int:
    """Estimate the 99th percentile of tokens per text, rounded up to a multiple of 32
    and limited to 512."""
    words = sorted(len(WORD.findall(text)) for text in texts)
    most = words[math.ceil(0.99 * len(words)) - 1] * PIECES_PER_WORD + 2
    return min(512, 32 * math.ceil(most / 32))
