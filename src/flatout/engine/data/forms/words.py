"""Rows of words with one tag each; characters with spans are converted to that form.

A row's text is its words, separated by one space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa

from flatout.engine.data.column_checks import Check, checks_of
from flatout.engine.data.raw_texts import RawBatch, name_of
from flatout.engine.files.content_key import plain_values

WORD = re.compile(r"\w+|[^\w\s]")
"""Matches the words and single punctuation signs of a text that is not split yet."""
SPAN_KEYS = (("start", "begin"), ("end", "stop"), ("label", "entity", "type", "tag"))
Found = tuple[list[str], list[str]]
"""Words and tags of a row."""


class _Fault(ValueError):
    """An error in a row."""


def read_words(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Return texts (N,) of words from lists, JSON lists or plain texts; null for an
    unusable value."""
    rows = [
        _tried(lambda v: (_words(name, v), []), value) for value in _values(batch, name)
    ]
    return _texts(rows), checks_of(rows)


def read_tagged(
    batch: RawBatch, text: str, label: str
) -> tuple[Any, Any, list[tuple[str, Check]]]:
    """Return texts (N,) of words, lists of tags, and errors by column."""
    pairs = zip(_values(batch, text), _values(batch, label), strict=True)
    rows = [_tried(lambda pair: _tagged(text, label, *pair), pair) for pair in pairs]
    tags = [row[1] if isinstance(row, tuple) else None for row in rows]
    checks = [(label, check) for check in checks_of(rows)]
    return _texts(rows), pa.array(tags, pa.list_(pa.string())), checks


def _tried(read: Any, value: Any) -> Found | str:
    try:
        found: Found = read(value)
    except _Fault as fault:
        return str(fault)
    return found


def _values(batch: RawBatch, name: str) -> list[Any]:
    array = plain_values(batch.columns[name])
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [None] * len(array)


def _texts(rows: list[Found | str]) -> Any:
    found = [" ".join(row[0]) if isinstance(row, tuple) else None for row in rows]
    return pa.array(found, pa.string())


def _words(name: str, value: Any) -> list[str]:
    found = _listed(value) if not _is_prose(value) else WORD.findall(value)
    if value is None:
        raise _Fault(f"{name} is missing")
    if not isinstance(found, list) or not all(isinstance(w, str) for w in found):
        raise _Fault(f"{name} is neither a list of words nor text")
    if not found:
        raise _Fault(f"{name} is empty")
    if any(not word or re.search(r"\s", word) for word in found):
        raise _Fault(f"{name} has a word that is empty or holds white space")
    return found


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(_listed(value), list)


def _listed(value: Any) -> Any:
    """Return a list, also if a text contains it as JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _tagged(text: str, label: str, value: Any, tags: Any) -> Found:
    given = _listed(tags)
    if given is None:
        raise _Fault(f"{label} is missing")
    if not isinstance(given, list):
        raise _Fault(f"{label} is no list of tags or spans")
    if _is_prose(value):
        return _of_spans(label, value, given)
    words = _words(text, value)
    given = [name_of(tag) if type(tag) is int else tag for tag in given]
    if not all(isinstance(tag, str) and tag for tag in given):
        raise _Fault(f"{label} is no list of tags")
    if len(given) != len(words):
        raise _Fault(f"{label} has another length than {text}")
    return words, given


def _of_spans(label: str, text: str, spans: list[Any]) -> Found:
    """Return words, split at the bounds of spans, and B- and I- tags."""
    known = sorted(_span(label, span, len(text)) for span in spans)
    if any(a[1] > b[0] for a, b in pairwise(known)):
        raise _Fault(f"{label} has spans that overlap")
    bounds = {place for span in known for place in span[:2]}
    words, tags, ahead = [], [], list(known)
    begun = False
    for start, end in _cut(text, bounds):
        while ahead and ahead[0][1] <= start:
            ahead.pop(0)
            begun = False
        inside = bool(ahead) and ahead[0][0] <= start
        words.append(text[start:end])
        tags.append(f"{'I' if begun else 'B'}-{ahead[0][2]}" if inside else "O")
        begun = inside
    if not words:
        raise _Fault(f"the text of {label} is empty")
    return words, tags


def _cut(text: str, bounds: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of words; a word never crosses a bound."""
    for found in WORD.finditer(text):
        inner = [b for b in range(found.start() + 1, found.end()) if b in bounds]
        places = [found.start(), *inner, found.end()]
        yield from pairwise(places)


def _span(label: str, span: Any, length: int) -> tuple[int, int, str]:
    values = [
        span[k]
        for keys in SPAN_KEYS
        for k in keys
        if isinstance(span, dict) and k in span
    ]
    if isinstance(span, (list, tuple)):
        values = list(span)
    kinds = [type(value) for value in values]
    if kinds != [int, int, str]:
        raise _Fault(f"{label} has a span that is not start, end, label")
    start, end, name = values
    if not 0 <= start < end <= length:
        raise _Fault(f"{label} has a span outside of its text")
    return start, end, name
