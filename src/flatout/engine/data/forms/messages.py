"""Conversations: lists of messages with a role and a content."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    checks_of,
    parsed_list,
    python_values,
)
from flatout.engine.data.raw_texts import RawBatch

ASSISTANT = "assistant"
"""The role whose messages the model learns."""


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
        return f"{name} has no message of the assistant: nothing would be learnt"
    if not all(answer.strip() for answer in answers):
        return f"{name} has an empty message of the assistant"
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
