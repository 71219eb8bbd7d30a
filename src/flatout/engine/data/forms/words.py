"""Rows of words with a tag each. A row's text is its words, separated by a space."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    checks_of,
    parsed_list,
    python_values,
)
from flatout.engine.data.raw_texts import RawBatch, name_of

WORD = re.compile(r"\w+|[^\w\s]")
"""Matches the words and single punctuation signs of a text that is not split yet."""
Found = tuple[list[str], list[str]]
"""Words and tags of a row."""


def read_words(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Return texts (N,) of words from lists, JSON lists or plain texts; null for an
    unusable value."""
    rows = [_words(name, value) for value in python_values(batch, name)]
    return _texts(rows), checks_of(rows)


def read_tagged(
    batch: RawBatch, text: str, label: str
) -> tuple[Any, Any, list[tuple[str, Check]]]:
    """Return texts (N,) of words, lists of tags, and errors by column."""
    pairs = zip(python_values(batch, text), python_values(batch, label), strict=True)
    rows = [_tagged(text, label, *pair) for pair in pairs]
    words = [row if isinstance(row, str) else row[0] for row in rows]
    tags = [None if isinstance(row, str) else row[1] for row in rows]
    checks = [(label, check) for check in checks_of(rows)]
    return _texts(words), pa.array(tags, pa.list_(pa.string())), checks


def _texts(rows: list[list[str] | str]) -> Any:
    found = [None if isinstance(row, str) else " ".join(row) for row in rows]
    return pa.array(found, pa.string())


def _words(name: str, value: Any) -> list[str] | str:
    """Return the words, or the error."""
    found = parsed_list(value)
    if isinstance(found, str):
        found = WORD.findall(found)
    if found is None:
        return f"{name} is missing"
    if not isinstance(found, list) or not all(isinstance(w, str) for w in found):
        return f"{name} is neither a list of words nor text"
    if not found:
        return f"{name} is empty"
    if any(not word or re.search(r"\s", word) for word in found):
        return f"{name} has a word that is empty or holds white space"
    return found


def _tagged(text: str, label: str, value: Any, given: Any) -> Found | str:
    """Return words and tags, or the error."""
    tags = parsed_list(given)
    if tags is None:
        return f"{label} is missing"
    if not isinstance(tags, list):
        return f"{label} is no list of tags"
    words = _words(text, value)
    if isinstance(words, str):
        return words
    tags = [name_of(tag) if type(tag) is int else tag for tag in tags]
    if not all(isinstance(tag, str) and tag for tag in tags):
        return f"{label} is no list of tags"
    if len(tags) != len(words):
        return f"{label} has another length than {text}"
    return words, tags
