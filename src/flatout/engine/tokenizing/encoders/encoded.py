"""Rows of token ids laid end to end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
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


def flat(rows: Sequence[list[int]], typecode: str = "i") -> Any:
    """Lists end to end as an array. (The library gives ids as lists only; this is the
    cheapest way out of them, 4 % of the time of encoding.)"""
    joined = array(typecode)
    for row in rows:
        joined.fromlist(row)
    return np.frombuffer(joined, {"i": np.int32, "b": np.int8}[typecode])
