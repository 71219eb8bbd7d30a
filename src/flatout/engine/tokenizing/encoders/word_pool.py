"""Tokens of words that were met before, and rows put together from them.

Looking a word up costs a tenth of a microsecond, finding its pieces ten; and a row is
put together with numpy, without a Python object a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from flatout.engine.tokenizing.encoders.encoded import Encoded, Ids, Ints, ranges

MAX_WORDS = 400_000
MAX_CHARACTERS = 32 << 20
"""The pool is emptied when it holds more, about 100 MB in all."""


class WordPool:
    """Ids of words; `ids[offsets[i]:offsets[i + 1]]` are those of word number i."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._clear()

    def _clear(self) -> None:
        self._numbers: dict[str, int] = {}
        self._characters = 0
        self._ids: Ids = np.empty(0, np.int32)
        self._offsets: Ints = np.zeros(1, np.int64)

    def rows(
        self, words: Sequence[Sequence[str]], limit: int | None, around: tuple[Ids, Ids]
    ) -> Encoded:
        """N rows of words: at most `limit` ids of the words each, between `around`."""
        numbers = self._numbers_of(words)
        word_sizes = np.diff(self._offsets)[numbers]
        sizes = _sums(word_sizes, np.fromiter(map(len, words), np.int64, len(words)))
        values = self._ids[ranges(self._offsets[numbers], word_sizes)]
        kept = sizes if limit is None else np.minimum(sizes, limit)
        if limit is not None:
            values = values[ranges(np.cumsum(sizes) - sizes, kept)]
        self._forget_if_full()
        ids, lengths = _between(values, kept, around)
        return Encoded(ids, lengths.astype(np.int32), kept < sizes)

    def _numbers_of(self, words: Sequence[Sequence[str]]) -> Ints:
        """Numbers (W,) of all words of all rows; words not yet met are encoded."""
        new = list(set().union(*words).difference(self._numbers))
        if new:
            self._add(new)
        numbers = map(self._numbers.__getitem__, chain.from_iterable(words))
        return np.fromiter(numbers, np.int64)

    def _add(self, words: list[str]) -> None:
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        first = len(self._numbers)
        numbers = range(first, first + len(words))
        self._numbers.update(zip(words, numbers, strict=True))
        self._characters += sum(map(len, words))
        found = [np.array(encoding.ids, np.int32) for encoding in encodings]
        ends = np.cumsum([len(ids) for ids in found]) + self._offsets[-1]
        self._ids = np.concatenate([self._ids, *found])
        self._offsets = np.concatenate([self._offsets, ends])

    def _forget_if_full(self) -> None:
        if len(self._numbers) > MAX_WORDS or self._characters > MAX_CHARACTERS:
            self._clear()


def _sums(values: Ints, sizes: Ints) -> Ints:
    """Sums (N,) of consecutive groups of `sizes` (N,) of `values`."""
    ends = np.cumsum(sizes)
    running = np.concatenate([[0], np.cumsum(values)])
    sums: Ints = running[ends] - running[ends - sizes]
    return sums


def _between(values: Ids, sizes: Ints, around: tuple[Ids, Ids]) -> tuple[Ids, Ints]:
    """Groups of `values` of `sizes` (N,), each between the ids of `around`."""
    before, after = around
    lengths = sizes + len(before) + len(after)
    starts = np.cumsum(lengths) - lengths
    ids = np.empty(int(lengths.sum()), np.int32)
    for place, id_ in enumerate(before):
        ids[starts + place] = id_
    for place, id_ in enumerate(after):
        ids[starts + lengths - len(after) + place] = id_
    ids[ranges(starts + len(before), sizes)] = values
    return ids, lengths
