"""What the split must know of every row, gathered in one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.row_hashes import Hashes

REJECTED, DUPLICATE = -1, -2
"""Codes of rows that are in no split; the splits' codes are their places in SPLITS."""
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class RowFacts:
    """What the first pass keeps of the good rows, N in all. About 41 bytes a row."""

    exact: Hashes
    """(N, words) hash of the content: the same of rows that are repeats."""
    near: Hashes
    """(N,) hash of the content in one form."""
    rows: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int8]
    """(N,) codes of the splits that are given; -1 where none is."""
    label_kinds: npt.NDArray[np.uint8]
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    labels: npt.NDArray[np.int32]
    """(N,) into `label_sets`."""
    label_sets: list[tuple[str, ...]]
    """What rows have: the name of a class, or those of several labels, sorted."""
    given: frozenset[int]
    """Codes of all that are given, also of those without a good row."""
    num_raw: int
    groups: Hashes | None = None
    numbers: npt.NDArray[np.float64] | None = None
    """(N,) what a regression is to find."""

    @property
    def are_given(self) -> bool:
        """Whether rows come with their splits."""
        return bool(self.given)

    def at(self, row: int) -> tuple[str, int]:
        """Where one of the N was read: its source, and its number there."""
        return self.source_names[self.sources[row]], int(self.rows[row])

    def labels_of(self, row: int) -> tuple[str, ...]:
        """Names that one of the N has."""
        return self.label_sets[int(self.labels[row])]


class FactCollector:
    """Gathers RowFacts batch by batch."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._label_codes: dict[tuple[str, ...], int] = {}
        self._source_codes: dict[str, int] = {}
        self.rejected: list[Any] = []
        self.given: set[int] = set()
        self.num_raw = 0

    def add(self, sources: Sequence[str], **arrays: npt.NDArray[Any] | None) -> None:
        """`sources` (n,) of rows that can be used, and fields of RowFacts by name."""
        known = self._source_codes
        codes = [known.setdefault(source, len(known)) for source in sources]
        self._parts["sources"].append(np.array(codes, np.int32))
        for name, array in arrays.items():
            if array is not None:
                self._parts[name].append(array)

    def replace(self, **arrays: list[npt.NDArray[Any]]) -> None:
        """Fields that were added, by batches, in place of what was added."""
        self._parts.update(arrays)

    def add_labels(self, labels: Any) -> None:
        """An Arrow array (n,) of names, lists of names, numbers or nulls."""
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
        """Rows that cannot be used, of `num_raw` raw ones."""
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
    """Of a row's labels; numbers are no names."""
    return tuple(sorted({label for label in labels if isinstance(label, str)}))
