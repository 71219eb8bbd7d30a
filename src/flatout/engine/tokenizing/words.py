"""A tokenizer whose pieces are the whole words of the train split: keys of a log."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
from tokenizers import Tokenizer, models, pre_tokenizers

from flatout.engine.tokenizing.word_pieces import SPECIAL_TOKENS, with_ends


def commonest_words(texts: Any, limit: int) -> tuple[list[str], int]:
    """Most frequent words of an Arrow column of texts, limited to a vocabulary of
    `limit` and sorted by frequency, and the number of all words."""
    counts: dict[str, int] = {}
    for chunk in texts.chunks:
        found = pc.value_counts(pc.utf8_split_whitespace(chunk).flatten())
        for word, count in zip(*map(_listed, found.flatten()), strict=True):
            counts[word] = counts.get(word, 0) + count
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return ranked[: limit - len(SPECIAL_TOKENS)], len(ranked)


def word_tokenizer(words: list[str]) -> Tokenizer:
    """Words between white space; others are unknown. Rows have a start and an end."""
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *words])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_ends(tokenizer)


def _listed(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values
