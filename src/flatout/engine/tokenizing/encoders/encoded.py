"""Rows of token ids laid end to end, and how they are moved about with numpy."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokensError(ValueError):
    """Rows that cannot become token rows; says which and what to do."""


@dataclass(frozen=True)
class Encoded:
    """N rows, T tokens in all."""

    ids: Ids
    """(T,)"""
    lengths: Ids
    """(N,)"""
    cut: Mask
    """(N,) whether the text was longer than `max_length`."""
    type_ids: npt.NDArray[np.int8] | None = None
    """(T,) for pairs of texts."""
    marks: Ids | None = None
    """(T,) of rows of words: the number of the word whose first piece a token is, -1
    at all others. Of completions: 0 at what is to be learnt, -1 elsewhere."""

    def to_bytes(self) -> bytes:
        parts: list[npt.NDArray[Any]] = [self.ids, self.lengths, self.cut]
        parts += [] if self.marks is None else [self.marks]
        parts += [] if self.type_ids is None else [self.type_ids]
        there = [self.marks is not None, self.type_ids is not None]
        head = json.dumps([len(self.ids), len(self.lengths), *there]).encode()
        return b"".join([head, b"\n", *(part.tobytes() for part in parts)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Encoded:
        at = data.index(b"\n") + 1
        tokens, rows, marked, typed = json.loads(data[:at])
        lengths_at, cut_at = at + 4 * tokens, at + 4 * (tokens + rows)
        marks_at = cut_at + rows
        types_at = marks_at + 4 * tokens * marked
        # What stands behind single bytes lies at no multiple of four.
        marks = np.frombuffer(data[marks_at:types_at], np.int32) if marked else None
        return cls(
            ids=np.frombuffer(data, np.int32, tokens, at),
            lengths=np.frombuffer(data, np.int32, rows, lengths_at),
            cut=np.frombuffer(data, np.bool_, rows, cut_at),
            type_ids=np.frombuffer(data, np.int8, tokens, types_at) if typed else None,
            marks=marks,
        )


def flat(rows: Sequence[list[int]], typecode: str = "i") -> Any:
    """Lists end to end as an array. (The library gives ids as lists only; this is the
    cheapest way out of them, 4 % of the time of encoding.)"""
    joined = array(typecode)
    for row in rows:
        joined.fromlist(row)
    return np.frombuffer(joined, {"i": np.int32, "b": np.int8}[typecode])


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """start, start + 1, ..., start + size - 1 of each of N ranges, end to end."""
    before = np.cumsum(sizes) - sizes
    found: Ints = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
    return found


def with_rows(encoded: Encoded, at: Ints, others: Encoded) -> Encoded:
    """`encoded` with its rows `at` replaced by those of `others`, in that order."""
    old = encoded.lengths.astype(np.int64)
    new = old.copy()
    new[at] = others.lengths
    starts, old_starts = np.cumsum(new) - new, np.cumsum(old) - old
    stays = np.ones(len(old), dtype=bool)
    stays[at] = False
    ids = np.empty(int(new.sum()), np.int32)
    ids[ranges(starts[stays], old[stays])] = encoded.ids[
        ranges(old_starts[stays], old[stays])
    ]
    ids[ranges(starts[at], new[at])] = others.ids
    cut = encoded.cut.copy()
    cut[at] = others.cut
    return Encoded(ids, new.astype(np.int32), cut)


def with_something_in_each(encoded: Encoded, empty_id: int | None) -> Encoded:
    """Rows without a token get `empty_id`: a model cannot read nothing."""
    empty = np.flatnonzero(encoded.lengths == 0)
    if not len(empty):
        return encoded
    if empty_id is None:
        raise ValueError(
            "the tokenizer leaves no token of a text, and it has no unknown or end "
            "token to stand for it"
        )
    ones = np.ones(len(empty), np.int32)
    filled = with_rows(encoded, empty, Encoded(ones * empty_id, ones, ones == 0))
    if encoded.marks is None:
        return filled
    starts = (np.cumsum(encoded.lengths) - encoded.lengths)[empty]
    return replace(filled, marks=np.insert(encoded.marks, starts, -1))
