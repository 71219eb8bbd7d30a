"""The Rust tokenizer as it is, kept from reading more than the tokens need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute as pc
from tokenizers import Tokenizer

from flatout.engine.tokenizing.encoders.encoded import Encoded, flat
from flatout.engine.tokenizing.encoders.pair_heads import (
    PIECE_CHARACTERS,
    SPARE_TOKENS,
    pair_heads,
    pieces_of,
    up_to_space,
)

CHARACTERS_PER_TOKEN = 6
"""Of a text longer than this times `max_length` only a head is encoded at first."""


@dataclass(frozen=True)
class EncodeOptions:
    """What decides the ids, besides text and tokenizer."""

    max_length: int
    has_pair: bool = False
    join: bool = False
    end_id: int | None = None
    """Joined texts: put between two of them where the tokenizer puts nothing there."""
    form: str = "text"
    """What a row is made of: a text, `words` with one space between them, a
    `completion` behind its prompt, `messages`."""
    empty_id: int | None = None
    """Stands for a text of which the tokenizer leaves no token."""


class PlainEncoder:
    """Encodes Arrow columns of texts by `encode_batch_fast`."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.options = options
        self._tokenizer = tokenizer
        self._added = tokenizer.num_special_tokens_to_add(options.has_pair)
        tokenizer.no_padding()
        if options.join:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(options.max_length)

    def encode(self, texts: Any) -> Encoded:
        if self.options.join:
            return self._encode_to_join(texts)
        return self._collect(self._encode_heads(texts))

    def encode_pairs(self, texts: Any, pairs: Any) -> Encoded:
        limit = CHARACTERS_PER_TOKEN * self.options.max_length
        inputs = [
            (text, pair)
            if len(text) <= limit and len(pair) <= limit
            else self._pair_heads(text, pair, limit)
            for text, pair in zip(texts.to_pylist(), pairs.to_pylist(), strict=True)
        ]
        encodings = self._tokenizer.encode_batch_fast(inputs)
        rows = self._collect(encodings)
        type_ids = flat([encoding.type_ids for encoding in encodings], "b")
        return Encoded(rows.ids, rows.lengths, rows.cut, type_ids)

    def encode_completions(
        self, prompts: Any, completions: Any, before: list[int], after: list[int]
    ) -> Encoded:
        """Prompts and what follows them, each encoded by itself, as a model meets them
        when it writes; `after` ends them. `marks` are 0 at what is learnt."""
        found = [
            self._tokenizer.encode_batch_fast(t.to_pylist(), add_special_tokens=False)
            for t in (prompts, completions)
        ]
        size, rows, marks, cut = self.options.max_length, [], [], []
        for prompt, completion in zip(*found, strict=True):
            known, learnt = before + prompt.ids, completion.ids + after
            rows.append((known + learnt)[:size])
            marks.append(([-1] * len(known) + [0] * len(learnt))[:size])
            cut.append(len(known) + len(learnt) > size)
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        return Encoded(flat(rows), lengths, np.array(cut, bool), marks=flat(marks))

    def encode_words(self, texts: Any) -> Encoded:
        """Texts of words, each word by itself; `marks` are the words' first pieces."""
        words = [text.split(" ") for text in texts.to_pylist()]
        encodings = self._tokenizer.encode_batch(words, is_pretokenized=True)
        rows = self._collect(encodings)
        parts = [[-1 if w is None else w for w in e.word_ids] for e in encodings]
        numbers = flat(parts)
        before = np.concatenate([[-1], numbers[:-1]])
        starts = (np.cumsum(rows.lengths) - rows.lengths)[rows.lengths > 0]
        before[starts] = -1
        return replace(rows, marks=np.where(numbers != before, numbers, -1))

    def _pair_heads(self, text: str, pair: str, limit: int) -> tuple[str, str]:
        room = self.options.max_length - self._added
        return pair_heads(self._tokenizer, text, pair, limit, room)

    def _collect(self, encodings: list[Any]) -> Encoded:
        lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
        cut = np.zeros(len(lengths), dtype=bool)
        for index in np.flatnonzero(lengths == self.options.max_length).tolist():
            cut[index] = bool(encodings[index].overflowing)
        return Encoded(flat([encoding.ids for encoding in encodings]), lengths, cut)

    def _encode_heads(self, texts: Any) -> list[Any]:
        """Encodings; of long texts only as much is read as the first tokens need."""
        limit = CHARACTERS_PER_TOKEN * self.options.max_length
        long = np.flatnonzero(pc.greater(pc.utf8_length(texts), limit).to_numpy(False))
        inputs = (
            pc.utf8_slice_codeunits(texts, 0, limit) if len(long) else texts
        ).to_pylist()
        for index in long.tolist():
            inputs[index] = up_to_space(inputs[index])
        encodings: list[Any] = self._tokenizer.encode_batch_fast(inputs)
        self._encode_longer_heads(texts, limit, long.tolist(), encodings)
        return encodings

    def _encode_longer_heads(
        self, texts: Any, limit: int, rows: list[int], encodings: list[Any]
    ) -> None:
        """Longer and longer heads, until each of `rows` has its tokens."""
        while rows := [row for row in rows if not self._is_safe(encodings[row])]:
            limit *= 4
            heads = [texts[row].as_py() for row in rows]
            whole = [len(head) <= limit for head in heads]
            heads = [
                head if is_whole else up_to_space(head[:limit])
                for head, is_whole in zip(heads, whole, strict=True)
            ]
            found = self._tokenizer.encode_batch_fast(heads)
            for row, encoding in zip(rows, found, strict=True):
                encodings[row] = encoding
            rows = [row for row, done in zip(rows, whole, strict=True) if not done]

    def _is_safe(self, encoding: Any) -> bool:
        """Whether the head of a text gave the tokens that the whole text gives."""
        rest = encoding.overflowing
        return bool(rest) and len(rest[0]) - self._added >= SPARE_TOKENS

    def _encode_to_join(self, texts: Any) -> Encoded:
        """Whole texts, with what separates them."""
        values = texts.to_pylist()
        is_long = [len(text) > PIECE_CHARACTERS for text in values]
        short = [text for text, long in zip(values, is_long, strict=True) if not long]
        encodings = iter(self._tokenizer.encode_batch_fast(short))
        end = [] if self.options.end_id is None else [self.options.end_id]
        rows: list[list[int]] = [
            (list(chain(*self._pieces(text))) if long else next(encodings).ids) + end
            for text, long in zip(values, is_long, strict=True)
        ]
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        return Encoded(flat(rows), lengths, np.zeros(len(rows), dtype=bool))

    def _pieces(self, text: str) -> Iterator[list[int]]:
        """Ids of a very long text, a piece at a time, special tokens at its ends."""
        before, after = special_around(self._tokenizer) or ([], [])
        yield before
        for piece in pieces_of(text):
            yield self._tokenizer.encode(piece, add_special_tokens=False).ids
        yield after


def special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Special tokens put before and after a text; None where that cannot be told."""
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
