"""What the split must know of every row, gathered in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.row_hashes import Hashes, content_hashes, group_hashes
from flatout.engine.data.rows import CheckedBatch


@dataclass(frozen=True)
class RowFacts:
    """What the first pass keeps of the good rows, N in all. About 50 bytes a row."""

    exact: Hashes
    """(N, 2) 128-bit hash of the text (and its pair)."""
    near: Hashes
    """(N,) hash of the text in one form."""
    groups: Hashes | None
    numbers: npt.NDArray[np.float64] | None
    """(N,) what a regression is to find."""
    labels: npt.NDArray[np.int32]
    """(N,) into `label_names`."""
    label_names: list[str]
    label_kinds: npt.NDArray[np.uint8]
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """(N,) place among the rows that were cut into columns, good or not."""
    num_cut: int
    num_raw: int


class FactCollector:
    """Gathers RowFacts batch by batch."""

    def __init__(self) -> None:
        self.parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.label_codes: dict[str, int] = {}
        self.source_codes: dict[str, int] = {}
        self.rejected: list[Any] = []
        self.num_cut = self.num_raw = 0

    def add(self, checked: CheckedBatch, source: str, cut: int, broken: int) -> None:
        table = checked.table
        exact, near = content_hashes(table)
        code = self.source_codes.setdefault(source, len(self.source_codes))
        self._keep(
            exact=exact,
            near=near,
            label_kinds=checked.label_kinds,
            labels=self._label_codes(table),
            sources=np.full(table.num_rows, code, np.int32),
            rows=table.column("source_row").to_numpy(),
            positions=np.flatnonzero(checked.good) + self.num_cut,
        )
        if "label" in table.schema.names and not _names_labels(table):
            self._keep(numbers=table.column("label").to_numpy())
        if checked.groups is not None:
            self._keep(groups=group_hashes(checked.groups))
        if checked.rejected.num_rows:
            self.rejected.append(checked.rejected)
        self.num_cut += cut
        self.num_raw += cut + broken

    def _keep(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self.parts.setdefault(name, []).append(array)

    def _label_codes(self, table: Any) -> npt.NDArray[np.int32]:
        if not _names_labels(table):
            return np.zeros(table.num_rows, np.int32)
        encoded = table.column("label").dictionary_encode()
        codes = [
            self.label_codes.setdefault(name, len(self.label_codes))
            for name in encoded.dictionary.to_pylist()
        ]
        found: npt.NDArray[np.int32] = np.array(codes, np.int32)[
            encoded.indices.to_numpy(zero_copy_only=False)
        ]
        return found

    def facts(self) -> RowFacts:
        joined: dict[str, Any] = {
            name: np.concatenate(parts) for name, parts in self.parts.items()
        }
        return RowFacts(
            **{"groups": None, "numbers": None, **joined},
            label_names=list(self.label_codes),
            source_names=list(self.source_codes),
            num_cut=self.num_cut,
            num_raw=self.num_raw,
        )


def _names_labels(table: Any) -> bool:
    """Whether its labels are names; a regression's are numbers."""
    names = table.schema.names
    return "label" in names and pa.types.is_string(table.column("label").type)
