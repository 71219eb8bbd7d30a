"""Conversations in the format of the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.tokenizing.encoders.encoded import Encoded, TokensError, flat

GENERATION = re.compile(r"\{%-?\s*generation")
"""Matches the tag before the text of the assistant in a template."""
NO_TEMPLATE = (
    "split.messages_column needs a tokenizer with a chat template; this one has "
    "no template: use a checkpoint with one, or columns of prompts and completions "
    "(split.prompt_column, split.completion_column)"
)
NO_GENERATION = (
    "the tokenizer's chat template does not mark the text of the assistant: put "
    "{% generation %} before its content and {% endgeneration %} after the token that "
    "ends it, in chat_template.jinja of the checkpoint"
)


class ChatEncoder:
    """A saved tokenizer with its template; raises TokensError if it has no template."""

    def __init__(self, folder: Path, max_length: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_length = max_length
        self._special = set(self._tokenizer.all_special_ids)
        template = self._tokenizer.chat_template
        if template is None:
            raise TokensError(NO_TEMPLATE)
        if not GENERATION.search(str(template)):
            raise TokensError(NO_GENERATION)

    def encode(self, messages: Any, first_row: int) -> Encoded:
        """Encode an Arrow column of JSON; `marks` are 0 at tokens of the assistant."""
        rows = [self._row(json.loads(value)) for value in messages.to_pylist()]
        for number, (ids, mask) in enumerate(rows):
            self._check_end(ids, mask, first_row + number)
        size = self._max_length
        lengths = np.array([min(len(ids), size) for ids, _ in rows], np.int32)
        return Encoded(
            ids=flat([ids[:size] for ids, _ in rows]),
            lengths=lengths,
            cut=np.array([len(ids) > size for ids, _ in rows], dtype=bool),
            marks=flat([mask[:size] for _, mask in rows]) - 1,
        )

    def _row(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Return ids, and 1 at the tokens of the assistant."""
        found = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], found["assistant_masks"]

    def _check_end(self, ids: list[int], mask: list[int], row: int) -> None:
        """Check that the end token is learned; else a model never stops (trl#5988)."""
        last = int(np.flatnonzero(mask)[-1]) if any(mask) else -1
        # A line break may follow the token that ends a message.
        end = {ids[n] for n in range(max(0, last - 2), last + 1) if mask[n]}
        if self._special & end:
            return
        raise TokensError(
            f"row {row}: by the tokenizer's chat template, the text of the assistant "
            "ends without a special token, so the model would never learn to stop. "
            "Put {% endgeneration %} after the token that ends a message, in "
            "chat_template.jinja of the checkpoint"
        )
