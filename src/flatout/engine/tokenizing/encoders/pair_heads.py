"""Pairs of long texts, cut beforehand to what decides their tokens.

A pair that is too long loses tokens of its longer text first, and where both are long
each keeps half; of an odd number the longer one keeps one more. So beside enough tokens
of each text it must be known which of the two has more.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

SPARE_TOKENS = 8
"""The head of a text must give so many tokens more than wanted: its last few may be
others than those of the whole text. Where it does not, more is encoded."""
PIECE_CHARACTERS = 1 << 20
"""Texts that are not cut are encoded in pieces of this size: bounds memory."""


class _Head:
    """The first characters of a text, up to a space, and how many tokens they are."""

    def __init__(self, tokenizer: Tokenizer, text: str, limit: int) -> None:
        self._tokenizer, self._text, self._limit = tokenizer, text, limit
        self._measure()

    def _measure(self) -> None:
        self.is_whole = len(self._text) <= self._limit
        head = self._text[: self._limit]
        self.value = head if self.is_whole else up_to_space(head)
        self.tokens = count_tokens(self._tokenizer, self.value)

    def grow(self) -> None:
        self._limit *= 4
        self._measure()

    def grow_beyond(self, tokens: int) -> None:
        """Until the whole text surely has more than so many, or nothing is left."""
        while not self.is_whole and self.tokens - SPARE_TOKENS <= tokens:
            self.grow()

    def count_all(self) -> int:
        return sum(count_tokens(self._tokenizer, p) for p in pieces_of(self._text))


def pair_heads(
    tokenizer: Tokenizer, text: str, pair: str, limit: int, room: int
) -> tuple[str, str]:
    """Heads, of at least `limit` characters, that are cut to the same tokens as `text`
    and `pair` where `room` tokens are left for both."""
    first, second = (_Head(tokenizer, side, limit) for side in (text, pair))
    first.grow_beyond(room)
    second.grow_beyond(room)
    if first.is_whole or second.is_whole:
        first.grow_beyond(second.tokens)
        second.grow_beyond(first.tokens)
    elif room % 2:
        _order(first, second)
    return first.value, second.value


def _order(first: _Head, second: _Head) -> None:
    """Let that head have more tokens whose text has more."""
    first_is_longer = first.count_all() > second.count_all()
    longer, other = (first, second) if first_is_longer else (second, first)
    while (first.tokens > second.tokens) != first_is_longer:
        (other if longer.is_whole else longer).grow()


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Without special tokens, of a tokenizer that may cut."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return len(encoding) + sum(map(len, encoding.overflowing))


def pieces_of(text: str) -> Iterator[str]:
    """A very long text in parts that end before a space, where they have one."""
    while text:
        piece = text[:PIECE_CHARACTERS]
        if len(piece) < len(text):
            piece = up_to_space(piece) or piece
        yield piece
        text = text[len(piece) :]


def up_to_space(text: str) -> str:
    """`text` cut before its last space; nothing where it has none, since a word that
    is cut may have other tokens than its head."""
    return text.rpartition(" ")[0]
