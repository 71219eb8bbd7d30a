"""Data that is needed to assign each row to a split, collected in a single pass:
labels, given splits, and hashes that identify equal and nearly equal texts."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flatout.engine.data.raw_texts import SPLITS, name_of

Hashes = npt.NDArray[np.uint64]
TEXT_HASH = "text_hash"
"""Name of the column of token rows with the first 64 bits of each text's hash."""
REJECTED, DUPLICATE, DROPPED = -1, -2, -3
"""Codes of rows that are in no split. The code of a split is its index in SPLITS."""
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class RowFacts:
    """Data about the N usable rows, which takes about 41 bytes of memory per row."""

    exact: Hashes
    """Hash of each row's content, with the shape (N, number of 64-bit words). Duplicate
    rows have equal hashes."""
    near: Hashes
    """Hash of each row's normalised content (N,)."""
    rows: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int8]
    """Code of each row's given split (N,), or -1 if none is given."""
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    labels: npt.NDArray[np.int32]
    """Index of each row's labels in `label_sets` (N,)."""
    label_sets: list[tuple[str, ...]]
    """The distinct sets of labels, each a sorted tuple of class names."""
    given: frozenset[int]
    """Codes of all given splits, including splits without a usable row."""
    num_raw: int
    groups: Hashes | None = None
    numbers: npt.NDArray[np.float64] | None = None
    """Regression targets (N,)."""

    @property
    def are_given(self) -> bool:
        """Return whether the data provides the split of each row."""
        return bool(self.given)

    def at(self, row: int) -> tuple[str, int]:
        """Return the source of the usable row `row`, and its number in that source."""
        return self.source_names[self.sources[row]], int(self.rows[row])

    def labels_of(self, row: int) -> tuple[str, ...]:
        """Return the label names of the usable row `row`."""
        return self.label_sets[int(self.labels[row])]


class FactCollector:
    """Collects RowFacts batch by batch."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._label_codes: dict[tuple[str, ...], int] = {}
        self._source_codes: dict[str, int] = {}
        self.rejected: list[Any] = []
        self.given: set[int] = set()
        self.num_raw = 0

    def add(self, sources: Sequence[str], **arrays: npt.NDArray[Any] | None) -> None:
        """Add n usable rows. `sources` contains the source of each row, and `arrays`
        contains fields of RowFacts by name."""
        known = self._source_codes
        codes = [known.setdefault(source, len(known)) for source in sources]
        self._parts["sources"].append(np.array(codes, np.int32))
        for name, array in arrays.items():
            if array is not None:
                self._parts[name].append(array)

    def replace(self, **arrays: list[npt.NDArray[Any]]) -> None:
        """Replace fields of RowFacts. Each list contains one array per batch."""
        self._parts.update(arrays)

    def add_labels(self, labels: Any) -> None:
        """Add an Arrow array of n labels: names, lists of names, numbers or nulls."""
        kind, codes = labels.type, np.zeros(len(labels), np.int32)
        if pa.types.is_list(kind):
            sets = map(_set_of, labels.to_pylist())
            codes = np.fromiter(map(self._code, sets), np.int32, len(labels))
        elif pa.types.is_string(kind):
            encoded = labels.dictionary_encode()
            found = [self._code((name,)) for name in encoded.dictionary.to_pylist()]
            codes = np.array(found, np.int32)[encoded.indices.to_numpy(False)]
        elif pa.types.is_floating(kind):
            self._parts["numbers"].append(labels.to_numpy())
        self._parts["labels"].append(codes)

    def _code(self, names: tuple[str, ...]) -> int:
        return self._label_codes.setdefault(names, len(self._label_codes))

    def reject(self, rejected: Any, num_raw: int) -> None:
        """Add the rejected rows of a batch of `num_raw` raw rows."""
        self.num_raw += num_raw
        if rejected.num_rows:
            self.rejected.append(rejected)

    def facts(self) -> RowFacts:
        joined: dict[str, Any] = {
            name: np.concatenate(parts) for name, parts in self._parts.items()
        }
        return RowFacts(
            **joined,
            label_sets=list(self._label_codes),
            given=frozenset(self.given),
            source_names=list(self._source_codes),
            num_raw=self.num_raw,
        )


def _set_of(labels: list[Any]) -> tuple[str, ...]:
    """Return the label names of a row, sorted, or () if its labels are numbers."""
    return tuple(sorted({label for label in labels if isinstance(label, str)}))


def content_hashes(table: Any) -> tuple[Hashes, Hashes]:
    """Return hashes of the exact texts (N, 2) and of the normalised texts (N,)."""
    texts = _texts(table)
    # Hash only the anchor, so that all pairs with the same anchor are in one split.
    near = [xxhash.xxh3_64_intdigest(normalised_text(text).encode()) for text in texts]
    if "passages" in table.schema.names:
        lists = table.column("passages").to_pylist()
        texts = ["\x1f".join((a, *own)) for a, own in zip(texts, lists, strict=True)]
    return _exact(texts), np.array(near, np.uint64)


def text_hashes(table: Any) -> Hashes:
    """Return the column TEXT_HASH: 64 bits of the hash of each row's text (N,)."""
    return _exact(_texts(table))[:, 0]


def _texts(table: Any) -> list[str]:
    """Return the text of each row, followed by its second text if there is one."""
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
    """Return `text` with case, whitespace and Unicode form (NFKC) normalised."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def group_hashes(groups: Any | None) -> Hashes | None:
    if groups is None:
        return None
    names = map(name_of, groups.to_pylist())
    return np.array([xxhash.xxh3_64_intdigest(n.encode()) for n in names], np.uint64)


def scrambled(hashes: Hashes, seed: int) -> Hashes:
    """Return `hashes` mixed with `seed` by SplitMix64. Results for different seeds are
    independent of each other."""
    with np.errstate(over="ignore"):
        z = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed


def first_rows(exact: Hashes) -> npt.NDArray[np.int64]:
    """Return, for each row, the index of the first row with the same text (N,). `exact`
    contains the texts' hashes (N, words)."""
    order = np.lexsort(exact.T[::-1])  # The sort is stable: the first row comes first.
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (exact[order[1:]] != exact[order[:-1]]).any(axis=1)
    found = np.empty(len(order), np.int64)
    found[order] = order[starts][np.cumsum(starts) - 1]
    return found


def leaks(exact: Hashes, codes: Codes) -> list[npt.NDArray[np.int64]]:
    """Return an array for each text that is in more than one split. The array contains
    the index of the text's first row in each of these splits."""
    known = np.flatnonzero(codes >= 0)
    texts = first_rows(exact)
    _, at = np.unique(texts[known] * 8 + codes[known], return_index=True)
    rows = known[at]  # The first row of each text and code, sorted by text.
    bounds = np.flatnonzero(np.diff(texts[rows])) + 1
    return [part for part in np.split(rows, bounds) if len(part) > 1]


def count_shared_values(hashes: Hashes | None, codes: Codes) -> int:
    """Return how many distinct values of `hashes` (N,) are in more than one split, or 0
    if `hashes` is None."""
    if hashes is None:
        return 0
    parts = [np.unique(hashes[codes == code]) for code in range(len(SPLITS))]
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    return int((counts > 1).sum())
