"""What the columns of a file most likely are: a first guess, for people to look at."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engine.data.columns import listed
from flatout.engine.data.raw_texts import RawTexts, RawTextsError, batches_of

SAMPLED_ROWS = 2000
MOST_CLASSES = 200
SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test"}
PROMPTS = ("prompt", "question", "instruction", "input")
COMPLETIONS = ("completion", "answer", "response", "output")
LABELS = ("label", "labels", "class", "category", "target", "score", "rating", "tags")
SPLIT_COLUMNS = ("split", "partition", "subset", "fold", "set")
PIECES_PER_WORD = 1.4
"""Of a tokenizer, about; a word is letters in a row, or one other sign."""
WORD = re.compile(r"\w+|[^\w\s]")

Table = Mapping[str, Sequence[Any]]
"""Values by column, a place for each row; None where there is none."""
Sample = Mapping[str, Sequence[Any]]
"""The same without missing values, and without columns that have no others."""


@dataclass(frozen=True)
class Guess:
    """Values of `model.task`, `split` and `tokenize.max_length`, and why."""

    task: str
    split: dict[str, Any]
    max_length: int
    why: str


def guess(raw: RawTexts, text: str | None = None, label: str | None = None) -> Guess:
    """By names and values of the first rows; `text`, `label`: columns that somebody
    knows. Raises RawTextsError where there are none such, or none holds text."""
    table = _table(raw)
    known = {n: [v for v in values if v is not None] for n, values in table.items()}
    sample = {name: values for name, values in known.items() if values}
    for name in (text, label):
        if name is not None and name not in sample:
            raise RawTextsError(
                f"no column {name!r} with values in the first {SAMPLED_ROWS:,} rows; "
                f"there are {listed(list(sample))}"
            )
    for look in () if text or label else (_chats, _completions, _tagged_words):
        if found := look(table, sample):
            return found
    return _texts(sample, text, label)


def _table(raw: RawTexts) -> Table:
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
    return {name: _parsed(values) for name, values in found.items()}


def _parsed(values: list[Any]) -> list[Any]:
    """Lists where each is one, as JSON has it: readers give them as text."""
    told = [value for value in values if value is not None]
    if not _all(told, lambda v: isinstance(v, str) and v.startswith("[")):
        return values
    try:
        return [None if value is None else json.loads(value) for value in values]
    except ValueError:
        return values


def _chats(table: Table, sample: Sample) -> Guess | None:
    for name, values in sample.items():
        turns = values[0]
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if {"role", "content"} <= turns[0].keys():
                texts = [" ".join(str(t.get("content")) for t in v) for v in values]
                split = {"messages_column": name, "label_column": None}
                why = f"{name} holds messages with role and content"
                return Guess("causal-lm", split, _length(texts), why)
    return None


def _completions(table: Table, sample: Sample) -> Guess | None:
    texts = [name for name, values in sample.items() if _all_text(values)]
    prompt = _named(texts, PROMPTS)
    completion = _named(texts, COMPLETIONS)
    if prompt is None or completion is None or not _is_prose(sample[prompt]):
        return None
    if not _pairs(table, prompt, completion):
        return None
    joined = [f"{a} {b}" for a, b in _pairs(table, prompt, completion)]
    split = {
        "prompt_column": prompt,
        "completion_column": completion,
        "label_column": None,
    }
    why = f"{completion} completes {prompt}"
    return Guess("causal-lm", split, _length(joined), why)


def _tagged_words(table: Table, sample: Sample) -> Guess | None:
    """Two columns of lists, as long as each other in every row."""
    lists = [n for n, values in sample.items() if _all(values, _is_list_of_text)]
    for words in lists:
        for tags in lists:
            pairs = _pairs(table, words, tags)
            same = words != tags and pairs and all(len(a) == len(b) for a, b in pairs)
            if same and _distinct(sample[tags]) < _distinct(sample[words]):
                texts = [" ".join(row) for row in sample[words]]
                split = {"text_column": words, "label_column": tags}
                why = f"{tags} has a tag for each word of {words}"
                return Guess("token-classification", split, _length(texts), why)
    return None


def _texts(sample: Sample, text: str | None, label: str | None) -> Guess:
    text = text or _longest_prose({n: v for n, v in sample.items() if n != label})
    rest = {name: values for name, values in sample.items() if name != text}
    split: dict[str, Any] = {"text_column": text}
    if column := _split_column({n: v for n, v in rest.items() if n != label}):
        split["split_column"] = column
        del rest[column]
    task, own, why = _told_by(rest, label) if label else _told(rest) or UNLABELLED
    length = _length([str(value) for value in sample[text]])
    return Guess(task, split | own, length, f"{text} is the text, {why}")


def _longest_prose(sample: Sample) -> str:
    prose = {n: v for n, v in sample.items() if _all_text(v) and _is_prose(v)}
    if not prose:
        raise RawTextsError(
            f"no column looks like text; there are {listed(list(sample))}: name it "
            "with --text-column"
        )
    return max(prose, key=lambda name: _mean_length(prose[name]))


Told = tuple[str, dict[str, Any], str]
"""Task, columns, and why."""
UNLABELLED: Told = ("masked-lm", {"label_column": None}, "no column a label")


def _told_by(rest: Sample, label: str) -> Told:
    """Raises RawTextsError where the column is none of labels."""
    found = _told({label: rest[label]}) if label in rest else None
    if found is None:
        raise RawTextsError(
            f"{label!r} is no column of labels: it is the text, or holds neither "
            f"numbers nor at most {MOST_CLASSES} classes of several rows each"
        )
    return found


def _told(rest: Sample) -> Told | None:
    """By the name of a column, else by what it holds."""
    ways = (_several_labels, _flags, _classes, _numbers)
    named = [n for n in rest if n.strip().casefold() in LABELS]
    for names in (named, [n for n in rest if n not in named]):
        own = {name: rest[name] for name in names}
        found = next((told for way in ways if (told := way(own))), None)
        if found:
            return found
    return None


def _several_labels(rest: Sample) -> Told | None:
    for name, values in rest.items():
        if _all(values, _is_list_of_text):
            split = {"label_column": name}
            return "multi-label-classification", split, f"{name} holds lists of labels"
    return None


def _flags(rest: Sample) -> Told | None:
    """At least two columns of 0 and 1."""
    names = [n for n, v in rest.items() if {str(x) for x in v} == {"0", "1"}]
    if len(names) < 2:
        return None
    split = {"label_columns": names, "label_column": None}
    return "multi-label-classification", split, f"{', '.join(names)} are 0 or 1"


def _classes(rest: Sample) -> Told | None:
    for name, values in rest.items():
        if not _all(values, lambda value: isinstance(value, (str, int))):
            continue
        count = len({str(value) for value in values})
        fractions = any(not _is_whole(value) for value in values if _is_number(value))
        if 2 <= count <= min(MOST_CLASSES, len(values) / 2) and not fractions:
            why = f"{name} has {count} classes in the first {len(values):,} rows"
            return "sequence-classification", {"label_column": name}, why
    return None


def _numbers(rest: Sample) -> Told | None:
    for name, values in rest.items():
        is_id = name.strip().casefold() in ("id", "index", "") or name.endswith("_id")
        if _all(values, _is_number) and not is_id:
            return "regression", {"label_column": name}, f"{name} holds numbers"
    return None


def _split_column(rest: Sample) -> str | None:
    for name, values in rest.items():
        found = {str(value).strip().casefold() for value in values}
        if name.strip().casefold() in SPLIT_COLUMNS and found <= SPLIT_NAMES:
            return name
    return None


def _length(texts: Sequence[str]) -> int:
    """Tokens that 99 of 100 texts do not exceed, about; a multiple of 32."""
    words = sorted(len(WORD.findall(text)) for text in texts)
    most = words[math.ceil(0.99 * len(words)) - 1] * PIECES_PER_WORD + 2
    return min(512, 32 * math.ceil(most / 32))


def _pairs(table: Table, one: str, other: str) -> list[tuple[Any, Any]]:
    """Values of the rows that have both."""
    pairs = zip(table[one], table[other], strict=True)
    return [pair for pair in pairs if None not in pair]


def _named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    known = {name.strip().casefold(): name for name in names}
    return next((known[name] for name in wanted if name in known), None)


def _all(values: Sequence[Any], check: Callable[[Any], bool]) -> bool:
    return all(check(value) for value in values)


def _all_text(values: Sequence[Any]) -> bool:
    return _all(values, lambda value: isinstance(value, str))


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_prose(texts: Sequence[str]) -> bool:
    """Half of them have several words, or letters of a script without spaces."""
    several = sum(len(WORD.findall(text)) > 2 or len(text) > 40 for text in texts)
    return 2 * several >= len(texts) and not _all(texts, _is_number)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def _is_whole(value: Any) -> bool:
    return float(value) == int(float(value)) and "." not in str(value)


def _mean_length(texts: Sequence[str]) -> float:
    return sum(map(len, texts)) / len(texts)


def _distinct(rows: Sequence[Sequence[str]]) -> int:
    def flat() -> Iterator[str]:
        for row in rows:
            yield from row

    return len(set(flat()))
