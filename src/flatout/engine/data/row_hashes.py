"""Hashes of rows: equal text, nearly equal text, and a number in [0, 1)."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.data.raw_texts import name_of

Hashes = npt.NDArray[np.uint64]
TEXT_HASH = "text_hash"
"""Column of token rows that names their text: the first word of its exact hash."""


def content_hashes(table: Any) -> tuple[Hashes, Hashes]:
    """Return exact (N, 2) and near (N,) hashes of the texts of N rows."""
    texts = _texts(table)
    # All pairs and triplets of one anchor belong to one split.
    near = [xxhash.xxh3_64_intdigest(normalised_text(text).encode()) for text in texts]
    if "passages" in table.schema.names:
        lists = table.column("passages").to_pylist()
        texts = ["\x1f".join((a, *own)) for a, own in zip(texts, lists, strict=True)]
    return _exact(texts), np.array(near, np.uint64)


def text_hashes(table: Any) -> Hashes:
    """Return (N,) the values of TEXT_HASH for N rows."""
    return _exact(_texts(table))[:, 0]


def _texts(table: Any) -> list[str]:
    """Return the texts of rows, each with the second one."""
    texts: list[str] = table.column("text").to_pylist()
    for name in ("text_pair", "completion"):
        if name in table.schema.names:
            pairs = table.column(name).to_pylist()
            texts = [f"{a}\x1f{b}" for a, b in zip(texts, pairs, strict=True)]
    return texts


def _exact(texts: list[str]) -> Hashes:
    digests = b"".join([xxhash.xxh3_128_digest(text.encode()) for text in texts])
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def normalised_text(text: str) -> str:
    """Return text without differences of case, white space and Unicode composition."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def group_hashes(groups: Any | None) -> Hashes | None:
    if groups is None:
        return None
    names = map(name_of, groups.to_pylist())
    return np.array([xxhash.xxh3_64_intdigest(n.encode()) for n in names], np.uint64)


def scrambled(hashes: Hashes, seed: int) -> Hashes:
    """SplitMix64 of hash and seed: each seed gives an independent split."""
    with np.errstate(over="ignore"):
        z = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed


def first_rows(exact: Hashes) -> npt.NDArray[np.int64]:
    """(N,) index of the first row with the same text; usually the row itself."""
    order = np.lexsort(exact.T[::-1])  # stable: the first row sorts first
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (exact[order[1:]] != exact[order[:-1]]).any(axis=1)
    found = np.empty(len(order), np.int64)
    found[order] = order[starts][np.cumsum(starts) - 1]
    return found


def repeats(exact: Hashes) -> npt.NDArray[np.bool_]:
    """(N,) mask of rows whose text is also in an earlier row."""
    repeated: npt.NDArray[np.bool_] = first_rows(exact) != np.arange(len(exact))
    return repeated


def leaks(exact: Hashes, codes: npt.NDArray[np.int8]) -> list[npt.NDArray[np.int64]]:
    """Return the first row of each code, for texts with several codes (N,) from 0."""
    known = np.flatnonzero(codes >= 0)
    texts = first_rows(exact)
    _, at = np.unique(texts[known] * 8 + codes[known], return_index=True)
    rows = known[at]  # the first row of each text and code, by text
    bounds = np.flatnonzero(np.diff(texts[rows])) + 1
    return [part for part in np.split(rows, bounds) if len(part) > 1]


def count_shared_values(
    hashes: Hashes | None, codes: npt.NDArray[np.int8], num_splits: int
) -> int:
    """Return how many values of `hashes` (N,) are under more than one code (N,)."""
    if hashes is None:
        return 0
    parts = [np.unique(hashes[codes == code]) for code in range(num_splits)]
    together = np.concatenate(parts)
    _, counts = np.unique(together, return_counts=True)
    return int((counts > 1).sum())
