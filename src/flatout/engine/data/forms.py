"""Read rows that contain more than a text and a label: tagged words, conversations,
pairs, triplets, and multi-label rows with one column of zeros and ones per label."""

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
    Faults,
    is_text,
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
"""Messages with this role are the training targets."""
FIRST = ("role", "content")
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""The roles of messages in the ShareGPT format, by their names in this format."""
WORD = re.compile(r"\w+|[^\w\s]")
"""Matches the words and punctuation marks of a plain text."""


def read_words(batch: RawBatch, name: str, faults: Faults) -> Any:
    """Return the words of each row, joined by single spaces, or null for rejected rows.
    The column may contain lists, JSON lists or plain texts."""
    rows = [_words(name, value) for value in python_values(batch, name, faults)]
    return _texts(faults.add_texts(name, rows))


def read_tagged(
    batch: RawBatch, text: str, label: str, faults: Faults
) -> tuple[Any, Any]:
    """Return the words of each of N rows, joined by single spaces, and N lists with one
    tag per word. Rejected rows are null in both arrays."""
    values = (python_values(batch, name, faults) for name in (text, label))
    pairs = zip(*values, strict=True)
    rows = faults.add_texts(label, [_tagged(text, label, *pair) for pair in pairs])
    words, tags = ([row and row[part] for row in rows] for part in (0, 1))
    return _texts(words), pa.array(tags, pa.list_(pa.string()))


def _texts(rows: list[list[str] | None]) -> Any:
    return pa.array([row and " ".join(row) for row in rows], pa.string())


def _words(name: str, value: Any) -> list[str] | str:
    """Return the words of a row, or the reason why it is rejected."""
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


def _tagged(text: str, label: str, value: Any, given: Any) -> tuple[Any, Any] | str:
    """Return the words and tags of a row, or the reason why it is rejected."""
    tags = parsed_list(given)
    if tags is None:
        return f"{label} is missing"
    if not isinstance(tags, list):
        return f"{label} is not a list of tags"
    words = _words(text, value)
    if isinstance(words, str):
        return words
    tags = [name_of(tag) if type(tag) is int else tag for tag in tags]
    if not all(isinstance(tag, str) and tag for tag in tags):
        return f"{label} is not a list of tags"
    if len(tags) != len(words):
        return f"{label} has a different length than {text}"
    return words, tags


def read_messages(batch: RawBatch, name: str, faults: Faults) -> tuple[Any, Any]:
    """Return two Arrow arrays of N conversations, as readable texts and as JSON, with
    null for rejected rows."""
    found = [_conversation(name, value) for value in python_values(batch, name, faults)]
    good = faults.add_texts(name, found)
    texts = [one and "\n".join(map(_readable, one)) for one in good]
    kept = [one and json.dumps(one, ensure_ascii=False, default=str) for one in good]
    return pa.array(texts, pa.string()), pa.array(kept, pa.string())


def _readable(message: dict[str, Any]) -> str:
    role, content, *others = message.values()
    return " ".join([f"{role}: {content}", *map(str, others)])


def _conversation(name: str, value: Any) -> list[dict[str, Any]] | str:
    """Return the messages of a conversation, or the reason why it is rejected. Other
    keys such as `tool_calls` are kept, because a chat template may read them."""
    messages = parsed_list(value)
    if messages is None:
        return f"{name} is missing"
    messages = list(map(as_message, messages)) if isinstance(messages, list) else None
    if messages is None or not all(map(_is_message, messages)):
        return f"{name} is not a list of messages with a role and a content"
    answers = [m["content"] for m in messages if m["role"] == ASSISTANT]
    if not answers:
        return f"{name} has no message with the role assistant (ShareGPT: from gpt)"
    if not all(answer.strip() for answer in answers):
        return f"{name} has an empty message of the assistant"
    return [
        {key: m[key] for key in (*FIRST, *m) if m[key] is not None} for m in messages
    ]


def as_message(value: Any) -> Any:
    """Convert a message in the ShareGPT format, which has `from` and `value`, to a
    message with `role` and `content`. Return other values unchanged."""
    is_other = not isinstance(value, dict) or not {"from", "value"} <= value.keys()
    if is_other or value.keys() & FIRST:
        return value
    rest = {key: v for key, v in value.items() if key not in ("from", "value")}
    role = SHAREGPT.get(str(value["from"]), value["from"])
    return {"role": role, "content": value["value"], **rest}


def _is_message(value: Any) -> bool:
    is_dict = isinstance(value, dict)
    return is_dict and all(isinstance(value.get(key), str) for key in FIRST)


def read_pairs(
    batch: RawBatch, anchor: str, positive: str, negative: str | None, faults: Faults
) -> tuple[Any, Any]:
    """Return N anchors, and N lists of the positive text followed by the negatives.
    Both are Arrow arrays with null for rejected rows."""
    anchors, positives = (read_text(batch, n, faults) for n in (anchor, positive))
    if negative is None:
        offsets = np.arange(len(positives) + 1, dtype=np.int32)
        return anchors, pa.ListArray.from_arrays(offsets, positives)
    given = python_values(batch, negative, faults)
    pairs = zip(positives.to_pylist(), given, strict=True)
    found = [_negatives(negative, value, positive) for positive, value in pairs]
    lists = faults.add_texts(negative, found)
    return anchors, pa.array(lists, pa.list_(pa.string()))


def _negatives(name: str, value: Any, positive: Any) -> list[Any] | str:
    """Return the positive and the negatives of a row, or why it is rejected."""
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
    return [positive, *found]


def read_flags(batch: RawBatch, names: Sequence[str], faults: Faults) -> Any:
    """Return an Arrow array with a list for each row: those of `names` in whose column
    the row has a 1. Rows with other values than 0 and 1 are rejected."""
    flags = np.zeros((len(batch.rows), len(names)), bool)
    for at, name in enumerate(names):
        numbers = read_number(with_digits(batch, name), name, Faults()).to_numpy(False)
        faults.add(name, named(batch.columns[name]).is_null(), "is missing")
        faults.add(name, (numbers != 0) & (numbers != 1), "is neither 0 nor 1")
        flags[:, at] = numbers == 1
    offsets = np.concatenate([[0], np.cumsum(flags.sum(1))]).astype(np.int32)
    chosen = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), chosen)


def with_digits(batch: RawBatch, name: str) -> RawBatch:
    """Return `batch` with "true" and "false" in the column `name` replaced by 1 and 0.
    (pandas writes booleans to CSV as words.)"""
    array = plain_values(batch.columns[name])
    if not is_text(array.type):
        return batch
    words = pc.utf8_lower(valid_utf8(array, name, Faults()))
    array = pc.if_else(pc.equal(words, "true"), "1", words)
    array = pc.if_else(pc.equal(words, "false"), "0", array)
    return replace(batch, columns={**batch.columns, name: array})
