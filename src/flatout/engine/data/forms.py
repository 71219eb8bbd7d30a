"""Forms of rows other than one text column and one label column: words with tags,
conversations, pairs and triplets, several columns of 0 and 1."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.column_checks import (
    Check,
    checks_of,
    is_text,
    mask_of,
    named,
    parsed_list,
    python_values,
    read_number,
    read_text,
    valid_utf8,
)
from flatout.engine.data.raw_texts import RawBatch, name_of
from flatout.engine.files.content_key import plain_values

ASSISTANT = "assistant"
"""The role whose messages the model learns."""
WORD = re.compile(r"\w+|[^\w\s]")
"""Matches the words and single punctuation signs of a text that is not split yet."""
Found = tuple[list[str], list[str]]
"""Words and tags of a row."""
ColumnCheck = tuple[str, Check]
"""A column, and a check of its values."""


def read_words(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Return texts (N,) of words from lists, JSON lists or plain texts; null for an
    unusable value."""
    rows = [_words(name, value) for value in python_values(batch, name)]
    return _texts(rows), checks_of(rows)


def read_tagged(
    batch: RawBatch, text: str, label: str
) -> tuple[Any, Any, list[ColumnCheck]]:
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
        return f"{name} has a word that is empty or contains white space"
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


def read_messages(batch: RawBatch, name: str) -> tuple[Any, Any, list[Check]]:
    """Return conversations (N,) as readable text and as JSON, and their errors."""
    found = [_conversation(name, value) for value in python_values(batch, name)]
    good = [None if isinstance(one, str) else one for one in found]
    texts = [
        one and "\n".join(f"{m['role']}: {m['content']}" for m in one) for one in good
    ]
    kept = [one and json.dumps(one, ensure_ascii=False) for one in good]
    return pa.array(texts, pa.string()), pa.array(kept, pa.string()), checks_of(found)


def _conversation(name: str, value: Any) -> list[dict[str, str]] | str:
    """Return the messages of a conversation, or its error."""
    messages = parsed_list(value)
    if messages is None:
        return f"{name} is missing"
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return f"{name} is no list of messages with a role and a content"
    answers = [m["content"] for m in messages if m["role"] == ASSISTANT]
    if not answers:
        return f"{name} has no message of the assistant, so no token is a target"
    if not all(answer.strip() for answer in answers):
        return f"{name} has an empty message of the assistant"
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def read_pairs(
    batch: RawBatch, anchor: str, positive: str, negative: str | None
) -> tuple[Any, Any, list[ColumnCheck]]:
    """Return anchors (N,), lists (N,) of the positive followed by the negatives, and
    errors by column."""
    anchors, first = read_text(batch, anchor)
    positives, second = read_text(batch, positive)
    checks = [(anchor, check) for check in first]
    checks += [(positive, check) for check in second]
    if negative is None:
        offsets = np.arange(len(positives) + 1, dtype=np.int32)
        return anchors, pa.ListArray.from_arrays(offsets, positives), checks
    values = python_values(batch, negative)
    pairs = list(zip(positives.to_pylist(), values, strict=True))
    found = [_negatives(negative, value, own) for own, value in pairs]
    checks += [(negative, check) for check in checks_of(found)]
    lists = [
        [own, *others] if isinstance(others, list) else None
        for (own, _), others in zip(pairs, found, strict=True)
    ]
    return anchors, pa.array(lists, pa.list_(pa.string())), checks


def _negatives(name: str, value: Any, positive: str | None) -> list[str] | str:
    """Return the texts, or the error."""
    if value is None:
        return f"{name} is missing"
    found = parsed_list(value)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(t, str) for t in found):
        return f"{name} is neither a text nor a list of texts"
    if not all(text.strip() for text in found):
        return f"{name} is empty"
    if positive in found:
        return f"{name} equals the positive"
    return found


def read_flags(batch: RawBatch, names: Sequence[str]) -> tuple[Any, list[ColumnCheck]]:
    """Return lists (N,) of names, and errors by column."""
    checks: list[ColumnCheck] = []
    flags = np.zeros((len(batch.rows), len(names)), bool)
    for at, name in enumerate(names):
        numbers = read_number(with_digits(batch, name), name)[0].to_numpy(False)
        missing = mask_of(named(batch.columns[name]).is_null())
        odd = (numbers != 0) & (numbers != 1)
        checks += [
            (name, (missing, f"{name} is missing")),
            (name, (odd, f"{name} is neither 0 nor 1")),
        ]
        flags[:, at] = numbers == 1
    offsets = np.concatenate([[0], np.cumsum(flags.sum(1))]).astype(np.int32)
    chosen = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), chosen), checks


def with_digits(batch: RawBatch, name: str) -> RawBatch:
    """Replace the words true and false, which pandas writes to CSV, with 1 and 0."""
    array = plain_values(batch.columns[name])
    if not is_text(array.type):
        return batch
    words = pc.utf8_lower(valid_utf8(array)[0])
    array = pc.if_else(pc.equal(words, "true"), "1", words)
    array = pc.if_else(pc.equal(words, "false"), "0", array)
    return replace(batch, columns={**batch.columns, name: array})
