"""Convert texts to token ids with the multithreaded Rust tokenizer. Conversations are
formatted with the tokenizer's chat template first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from tokenizers import Tokenizer

from flatout.engine.tokenizing.encoders.encoded import (
    Encoded,
    TokensError,
    flat,
    texts_of,
)
from flatout.engine.tokenizing.tokenizer import TokenizerFile

MOST_CHARACTERS = 1_000
"""Maximum number of characters to read per token. Longer texts are shortened before
encoding, to limit memory use."""


@dataclass(frozen=True)
class EncodeOptions:
    """Options that affect the token ids of texts."""

    max_length: int
    has_pair: bool = False
    join: bool = False
    end_id: int | None = None
    """Id of the end token to add after a text if the tokenizer adds none."""
    form: str = "text"
    """Form of the rows: `text`, `words` separated by single spaces, `completion` (of a
    prompt), `messages`, or `pairs`."""
    empty_id: int | None = None
    """Token id that represents a text without any tokens."""
    whole_ends: bool = False
    """Whether truncated texts get no end token, so that a model does not learn that
    texts end at `max_length`."""


class Encoder:
    """Encodes Arrow columns of texts with the Rust tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.options = options
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._before, self._after = special_around(tokenizer) or ([], [])
        self._end = [] if options.end_id is None else [options.end_id]
        ends = len(self._after) if options.whole_ends else 0
        self._size = options.max_length + ends
        if not options.join:
            tokenizer.enable_truncation(self._size)

    def encode(self, texts: Any, pairs: Any | None = None) -> Encoded:
        """Encode an Arrow column of N texts, optionally with N second texts."""
        if self.options.form == "completion":
            return self._encode_completions(texts, pairs)
        if pairs is not None:
            return self._encode_pairs(texts, pairs)
        if self.options.form == "words":
            return self._encode_words(texts)
        if self.options.join:
            return self._encode_to_join(texts)
        heads = pc.utf8_slice_codeunits(texts, 0, MOST_CHARACTERS * self._size)
        return self._collect(self._tokenizer.encode_batch_fast(heads.to_pylist()))

    def _encode_pairs(self, texts: Any, pairs: Any) -> Encoded:
        inputs = list(zip(texts.to_pylist(), pairs.to_pylist(), strict=True))
        encodings = self._tokenizer.encode_batch_fast(inputs)
        full = self.options.max_length
        type_ids = flat([encoding.type_ids[:full] for encoding in encodings], "b")
        return replace(self._collect(encodings), type_ids=type_ids)

    def _encode_completions(self, prompts: Any, completions: Any) -> Encoded:
        """Encode prompts and completions separately, because a model that generates
        text only sees the tokens of the prompt. `marks` are 0 at the tokens of
        completions, which are the targets, and -1 at the tokens of prompts."""
        found = [
            self._tokenizer.encode_batch_fast(t.to_pylist(), add_special_tokens=False)
            for t in (prompts, completions)
        ]
        size, rows, marks, cut = self.options.max_length, [], [], []
        for prompt, completion in zip(*found, strict=True):
            known = self._before + prompt.ids
            learnt = completion.ids + self._after + self._end
            rows.append((known + learnt)[:size])
            marks.append(([-1] * len(known) + [0] * len(learnt))[:size])
            cut.append(len(known) + len(learnt) > size)
        return replace(_encoded(rows, cut), marks=flat(marks))

    def _encode_words(self, texts: Any) -> Encoded:
        """Encode texts of words separated by spaces. `marks` contains the index of the
        word at the first token of each word, and -1 at all other tokens."""
        words = [text.split(" ") for text in texts.to_pylist()]
        encodings = self._tokenizer.encode_batch(words, is_pretokenized=True)
        marks = [_first_pieces(encoding.word_ids) or [-1] for encoding in encodings]
        return replace(self._collect(encodings), marks=flat(marks))

    def _collect(self, encodings: Sequence[Any]) -> Encoded:
        """Return encodings of the tokenizers library as an Encoded. A row without any
        token gets `empty_id`. Raises ValueError if this is needed but not set."""
        full = self.options.max_length
        rows = [encoding.ids[:full] for encoding in encodings]
        cut = [
            len(encoding) > full
            or (len(encoding) == self._size and bool(encoding.overflowing))
            for encoding in encodings
        ]
        if not all(rows) and self.options.empty_id is None:
            raise ValueError(
                "a text has no tokens, and the tokenizer has no unknown or end token "
                "to use instead"
            )
        return _encoded([row or [self.options.empty_id] for row in rows], cut)

    def _encode_to_join(self, texts: Any) -> Encoded:
        """Encode texts without truncation, and add `end_id` to each if it is set."""
        encodings = self._tokenizer.encode_batch_fast(texts.to_pylist())
        rows = [encoding.ids + self._end for encoding in encodings]
        return _encoded(rows, [False] * len(rows))


def _encoded(rows: Sequence[list[int]], cut: Sequence[bool]) -> Encoded:
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    return Encoded(flat(rows), lengths, np.array(cut, bool))


def _first_pieces(words: list[int | None]) -> list[int]:
    """Return a number for each token: the index of its word if the token is the first
    one of the word, or else -1. `words` contains the index of each token's word."""
    pairs = zip(words, [None, *words], strict=False)
    return [-1 if word is None or word == last else word for word, last in pairs]


def special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids of the special tokens that `tokenizer` adds before and after a
    text, or None if they cannot be determined."""
    found = set()
    for probe in ("a", "0 1", "The"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        full = tokenizer.encode(probe).ids
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        if not bare or not starts:
            return None
        before, after = full[: starts[0]], full[starts[0] + len(bare) :]
        found.add((tuple(before), tuple(after)))
    return (before, after) if len(found) == 1 else None


GENERATION = re.compile(r"\{%-?\s*generation")
"""Matches the tag that precedes the text of the assistant in a chat template."""
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
    """Encodes conversations with the chat template of a saved tokenizer. Raises
    TokensError if there is no template, or if it does not mark the assistant's text."""

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
        """Encode an Arrow column of conversations (JSON), from the row `first_row`.
        `marks` are 0 at tokens of the assistant."""
        rows = [self._row(json.loads(value)) for value in messages.to_pylist()]
        for number, (ids, mask) in enumerate(rows):
            self._check_end(ids, mask, first_row + number)
        size = self._max_length
        cut = [len(ids) > size for ids, _ in rows]
        marks = flat([mask[:size] for _, mask in rows]) - 1
        return replace(_encoded([ids[:size] for ids, _ in rows], cut), marks=marks)

    def _row(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return token ids, and a mask that is 1 at the assistant's tokens."""
        found = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], found["assistant_masks"]

    def _check_end(self, ids: list[int], mask: list[int], row: int) -> None:
        """Raise TokensError if the assistant's last message does not end with a special
        token as a target. The model would then never learn to stop (trl#5988)."""
        last = int(np.flatnonzero(mask)[-1]) if any(mask) else -1
        # A line break may follow the token that ends a message.
        end = {ids[n] for n in range(max(0, last - 2), last + 1) if mask[n]}
        if self._special & end:
            return
        raise TokensError(
            f"row {row}: in the tokenizer's chat template, the text of the assistant "
            "ends without a special token, so the model would never learn to stop. "
            "Put {% endgeneration %} after the token that ends a message, in "
            "chat_template.jinja of the checkpoint"
        )


RowEncoder = Callable[[Any, int], Encoded]
"""A function that encodes a table of rows. The second argument is the number of the
table's first row."""


def row_encoder(tokenizer: TokenizerFile, options: EncodeOptions) -> RowEncoder:
    if options.form == "messages":
        chats = ChatEncoder(tokenizer.folder, options.max_length)
        return lambda part, start: chats.encode(_column(part, "messages"), start)
    encoder = Encoder(tokenizer.backend, options)
    if options.form == "pairs":
        return lambda part, _: encoder.encode(texts_of(part))
    second = "completion" if options.form == "completion" else "text_pair"
    return lambda part, _: encoder.encode(
        _column(part, "text"),
        _column(part, second) if second in part.column_names else None,
    )


def _column(table: Any, name: str) -> Any:
    return table.column(name).combine_chunks()
