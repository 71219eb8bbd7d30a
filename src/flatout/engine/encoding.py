"""Texts to token ids, fast. Also the helper process of `encode`: imports little."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from flatout.engine.workers import serve

CHARACTERS_PER_TOKEN = 6
"""A text longer than this times `max_length` is cut before it is encoded."""
SPARE_TOKENS = 8
"""A cut text must give so many tokens more than wanted; the last few may differ from
those of the whole text. Where it does not, the whole text is encoded."""
PIECE_CHARACTERS = 1 << 20
"""Texts to be joined are encoded in pieces of this size, which bounds memory."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodeOptions:
    """What decides the ids, besides text and tokenizer."""

    max_length: int
    has_pair: bool = False
    join: bool = False
    end_id: int | None = None
    """Joined texts: put between two of them where the tokenizer puts nothing there."""
    empty_id: int | None = None
    """Stands for a text of which the tokenizer leaves no token."""


@dataclass(frozen=True)
class Encoded:
    """N rows laid end to end, T tokens."""

    ids: Ids
    """(T,)"""
    lengths: Ids
    """(N,)"""
    num_cut: int
    """Texts that were longer than `max_length`."""
    type_ids: npt.NDArray[np.int8] | None = None

    def to_bytes(self) -> bytes:
        parts: list[npt.NDArray[Any]] = [self.ids, self.lengths]
        parts += [] if self.type_ids is None else [self.type_ids]
        sizes = json.dumps([self.num_cut, *map(len, parts)]).encode()
        return b"".join([sizes, b"\n", *(part.tobytes() for part in parts)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Encoded:
        head = data.index(b"\n") + 1
        num_cut, tokens, rows, *types = json.loads(data[:head])
        lengths_at, types_at = head + 4 * tokens, head + 4 * (tokens + rows)
        return cls(
            ids=np.frombuffer(data, np.int32, tokens, head),
            lengths=np.frombuffer(data, np.int32, rows, lengths_at),
            num_cut=num_cut,
            type_ids=np.frombuffer(data, np.int8, types[0], types_at)
            if types
            else None,
        )


class Encoder:
    """A tokenizer with its options."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.options = options
        self._tokenizer = tokenizer
        self._added = tokenizer.num_special_tokens_to_add(options.has_pair)
        tokenizer.no_padding()
        if options.join:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(options.max_length)

    def encode(self, texts: Any, pairs: Any | None = None) -> Encoded:
        """Encode Arrow columns of N texts (and of as many second texts)."""
        if self.options.join:
            return self._encode_to_join(texts)
        if pairs is not None:
            inputs = list(zip(texts.to_pylist(), pairs.to_pylist(), strict=True))
            encodings = self._tokenizer.encode_batch_fast(inputs)
        else:
            encodings = self._encode_heads(texts)
        lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
        full = np.flatnonzero(lengths == self.options.max_length).tolist()
        num_cut = sum(bool(encodings[index].overflowing) for index in full)
        rows = [encoding.ids for encoding in encodings]
        self._fill_empty(rows, lengths)
        type_ids = [e.type_ids for e in encodings] if pairs is not None else None
        return Encoded(
            ids=_flat(rows, "i"),
            lengths=lengths,
            num_cut=num_cut,
            type_ids=None if type_ids is None else _flat(type_ids, "b"),
        )

    def _encode_heads(self, texts: Any) -> list[Any]:
        """Encodings; of long texts only as much is read as the first tokens need."""
        limit = CHARACTERS_PER_TOKEN * self.options.max_length
        long = np.flatnonzero(pc.greater(pc.utf8_length(texts), limit).to_numpy(False))
        inputs = (
            pc.utf8_slice_codeunits(texts, 0, limit) if len(long) else texts
        ).to_pylist()
        for index in long.tolist():
            inputs[index] = _up_to_space(inputs[index])
        encodings: list[Any] = self._tokenizer.encode_batch_fast(inputs)
        for index in long.tolist():
            if not self._is_safe(encodings[index]):
                encodings[index] = self._encode_head(texts[index].as_py(), limit)
        return encodings

    def _encode_head(self, text: str, limit: int) -> Any:
        """Try longer and longer heads of `text`."""
        while (limit := limit * 16) < len(text):
            encoding = self._tokenizer.encode(_up_to_space(text[:limit]))
            if self._is_safe(encoding):
                return encoding
        return self._tokenizer.encode(text)

    def _is_safe(self, encoding: Any) -> bool:
        """Whether the head of a text gave the tokens that the whole text gives."""
        rest = encoding.overflowing
        return bool(rest) and len(rest[0]) - self._added >= SPARE_TOKENS

    def _fill_empty(self, rows: list[list[int]], lengths: Ids) -> None:
        """A row must hold a token: a model cannot read nothing."""
        for index in np.flatnonzero(lengths == 0).tolist():
            if self.options.empty_id is None:
                raise ValueError(
                    "the tokenizer leaves no token of a text, and it has no unknown or "
                    "end token to stand for it"
                )
            rows[index] = [self.options.empty_id]
            lengths[index] = 1

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
        return Encoded(ids=_flat(rows, "i"), lengths=lengths, num_cut=0)

    def _pieces(self, text: str) -> Iterator[list[int]]:
        """Ids of a very long text, a piece at a time, special tokens at its ends."""
        before, after = self._special_around()
        yield before
        while text:
            piece = text[:PIECE_CHARACTERS]
            if len(piece) < len(text):
                piece = _up_to_space(piece) or piece
            yield self._tokenizer.encode(piece, add_special_tokens=False).ids
            text = text[len(piece) :]
        yield after

    def _special_around(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]


def _up_to_space(text: str) -> str:
    """`text` cut before its last space; nothing where it has none, since a word that
    is cut may have other tokens than its head."""
    return text.rpartition(" ")[0]


def _flat(rows: list[list[int]], typecode: str) -> Any:
    """Lists end to end as a numpy array. (The library gives ids as lists only; this
    is the cheapest way out of them, 4 % of the time of encoding.)"""
    flat = array(typecode)
    for row in rows:
        flat.fromlist(row)
    return np.frombuffer(flat, {"i": np.int32, "b": np.int8}[typecode])


def read_rows(file: str) -> Any:
    """Table of a memory-mapped Arrow stream; costs no reading of the rows."""
    return pa.ipc.open_stream(pa.memory_map(file)).read_all()


def encode_slice(encoder: Encoder, table: Any, start: int, stop: int) -> Encoded:
    """Encode rows `start` to `stop` of a table with `text` (and `text_pair`)."""
    part = table.slice(start, stop - start)
    pairs = None
    if encoder.options.has_pair:
        pairs = part.column("text_pair").combine_chunks()
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
