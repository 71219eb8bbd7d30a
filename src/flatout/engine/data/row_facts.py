"""Data on every row that the split needs, collected in one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.row_hashes import Hashes

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
