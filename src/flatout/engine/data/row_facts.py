"""Data on every row that the split needs, collected in one pass: hashes of equal and of
nearly equal texts, labels, given splits."""

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
"""Column of token rows that names their text: the first word of its exact hash."""
REJECTED, DUPLICATE, DROPPED = -1, -2, -3
"""Codes of rows that are in no split. Codes of splits are their indices in SPLITS."""
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class RowFacts:
    """Data on the N usable rows, kept by the first pass. About 41 bytes per row."""

    exact: Hashes
    """(N, words) hash of the content; equal for repeated rows."""
    near: Hashes
    """(N,) hash of the normalised content."""
    rows: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int8]
    """(N,) codes of the given splits; -1 if no split is given."""
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    labels: npt.NDArray[np.int32]
    """(N,) indices into `label_sets`."""
    label_sets: list[tuple[str, ...]]
    """Distinct labels of rows: the name of one class, or several names, sorted."""
    given: frozenset[int]
    """Codes of all given splits, including those without a usable row."""
    num_raw: int
    groups: Hashes | None = None
    numbers: npt.NDArray[np.float64] | None = None
    """(N,) regression targets."""

    @property
    def are_given(self) -> bool:
        """Return true if the data gives the split of each row."""
        return bool(self.given)

    def at(self, row: int) -> tuple[str, int]:
        """Return the source of usable row `row` and its number in that source."""
        return self.source_names[self.sources[row]], int(self.rows[row])

    def labels_of(self, row: int) -> tuple[str, ...]:
        """Return the label names of usable row `row`."""
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
        """Add usable rows: their `sources` (n,), and fields of RowFacts by name."""
        known = self._source_codes
        codes = [known.setdefault(source, len(known)) for source in sources]
        self._parts["sources"].append(np.array(codes, np.int32))
        for name, array in arrays.items():
            if array is not None:
                self._parts[name].append(array)

    def replace(self, **arrays: list[npt.NDArray[Any]]) -> None:
        """Replace fields that were added earlier; each list has one array per batch."""
        self._parts.update(arrays)

    def add_labels(self, labels: Any) -> None:
        """Add an Arrow array (n,) of names, lists of names, numbers or nulls."""
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
        """Add rejected rows out of `num_raw` raw rows."""
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
    """Return a row's label names, sorted; empty if the labels are numbers."""
    return tuple(sorted({label for label in labels if isinstance(label, str)}))


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


def leaks(exact: Hashes, codes: Codes) -> list[npt.NDArray[np.int64]]:
    """Return the first row of each code, for texts with several codes (N,) from 0."""
    known = np.flatnonzero(codes >= 0)
    texts = first_rows(exact)
    _, at = np.unique(texts[known] * 8 + codes[known], return_index=True)
    rows = known[at]  # the first row of each text and code, by text
    bounds = np.flatnonzero(np.diff(texts[rows])) + 1
    return [part for part in np.split(rows, bounds) if len(part) > 1]


def count_shared_values(hashes: Hashes | None, codes: Codes) -> int:
    """Return how many values of `hashes` (N,) are in more than one split."""
    if hashes is None:
        return 0
    parts = [np.unique(hashes[codes == code]) for code in range(len(SPLITS))]
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    return int((counts > 1).sum())
