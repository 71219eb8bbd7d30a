"""Texts to token ids, fast. Also the helper process of `encode`: imports little."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from flatout.engine.machine.workers import serve
from flatout.engine.tokenizing.encoders.encoded import (
    Encoded,
    with_rows,
    with_something_in_each,
)
from flatout.engine.tokenizing.encoders.pair_heads import PIECE_CHARACTERS
from flatout.engine.tokenizing.encoders.plain_encoder import (
    CHARACTERS_PER_TOKEN,
    EncodeOptions,
    PlainEncoder,
    special_around,
)
from flatout.engine.tokenizing.encoders.pre_tokenizing import Splitter, splitter_for
from flatout.engine.tokenizing.encoders.word_pool import WordPool


class Encoder:
    """A tokenizer with its options. Texts are put together from words that were met
    before where the tokenizer's rule allows it, and go the plain way otherwise, or
    where `by_words` is false: that way leaves Python to other threads."""

    def __init__(
        self, tokenizer: Tokenizer, options: EncodeOptions, *, by_words: bool = True
    ) -> None:
        self.options = options
        tokenizer.no_padding()
        tokenizer.no_truncation()
        around = special_around(tokenizer)
        prose = options.form == "text" and not options.has_pair
        usable = by_words and around is not None and prose
        self._splitter = splitter_for(tokenizer) if usable else None
        before, after = around or ([], [])
        after = after if options.end_id is None else [*after, options.end_id]
        self._around = np.array(before, np.int32), np.array(after, np.int32)
        words = Tokenizer.from_str(tokenizer.to_str()) if self._splitter else tokenizer
        self._pool = WordPool(words)
        self._plain = PlainEncoder(tokenizer, options)

    @property
    def knows_words(self) -> bool:
        """Whether texts are put together from words."""
        return self._splitter is not None

    def encode(self, texts: Any, pairs: Any | None = None) -> Encoded:
        """Encode Arrow columns of N texts (and of as many second texts)."""
        if self.options.form == "completion":
            before, after = (ids.tolist() for ids in self._around)
            return self._plain.encode_completions(texts, pairs, before, after)
        if pairs is not None:
            return self._plain.encode_pairs(texts, pairs)
        if self.options.form == "words":
            encoded = self._plain.encode_words(texts)
        elif self._splitter is None:
            encoded = self._plain.encode(texts)
        else:
            encoded = self._by_words(texts, self._splitter)
        if self.options.join:
            return encoded
        return with_something_in_each(encoded, self.options.empty_id)

    def _by_words(self, texts: Any, splitter: Splitter) -> Encoded:
        wanted = self._wanted
        values = texts.to_pylist()
        all_safe = splitter.is_safe("\n".join(values))
        found = [
            self._words(text, splitter, wanted)
            if all_safe or splitter.is_safe(text)
            else None
            for text in values
        ]
        words = [(row or [])[:wanted] for row in found]
        rows = self._pool.rows(words, wanted and wanted - 1, self._around)
        # A row whose words were not all taken, and yet too few, had words without ids.
        plain = [
            row is None or bool(wanted and len(row) > wanted and not cut)
            for row, cut in zip(found, rows.cut.tolist(), strict=True)
        ]
        at = np.flatnonzero(plain)
        if not len(at):
            return rows
        return with_rows(rows, at, self._plain.encode(texts.take(pa.array(at))))

    @property
    def _wanted(self) -> int | None:
        """Words that are looked at, one more than ids of words fit into a row."""
        if self.options.join:
            return None
        return self.options.max_length - sum(map(len, self._around)) + 1

    def _words(
        self, text: str, splitter: Splitter, wanted: int | None
    ) -> list[str] | None:
        """The words of `text`, or its first ones, more than `wanted`. None where it
        must be encoded as a whole."""
        if len(text) > PIECE_CHARACTERS:
            return None
        limit = CHARACTERS_PER_TOKEN * self.options.max_length
        while wanted is not None and limit < len(text):
            words = splitter.pieces(text[:limit])
            if words is None:
                return None
            words = _surely_whole(words)
            if len(words) > wanted:
                return words
            limit *= 4
        return splitter.pieces(text)


def _surely_whole(words: list[str]) -> list[str]:
    """Words of the head of a text, but the last, which may go on, and white space."""
    words = words[:-1]
    while words and words[-1].isspace():
        words.pop()
    return words


def read_rows(file: str) -> Any:
    """Table of a memory-mapped Arrow stream; costs no reading of the rows."""
    return pa.ipc.open_stream(pa.memory_map(file)).read_all()


def encode_slice(encoder: Encoder, table: Any, start: int, stop: int) -> Encoded:
    """Encode rows `start` to `stop` of a table with `text` (and `text_pair`)."""
    part = table.slice(start, stop - start)
    pairs = None
    second = "completion" if encoder.options.form == "completion" else "text_pair"
    if encoder.options.has_pair or second == "completion":
        pairs = part.column(second).combine_chunks()
    return encoder.encode(part.column("text").combine_chunks(), pairs)


def _prepare(setup: dict[str, Any]) -> Any:
    """For a helper process: from {tokenizer, options} to an answer for (file, rows)."""
    tokenizer = Tokenizer.from_file(setup["tokenizer"])
    encoder = Encoder(tokenizer, EncodeOptions(**setup["options"]))
    tables = lru_cache(maxsize=None)(read_rows)

    def answer(task: tuple[str, int, int]) -> bytes:
        file, start, stop = task
        return encode_slice(encoder, tables(file), start, stop).to_bytes()

    return answer


def main() -> None:
    serve(_prepare)
