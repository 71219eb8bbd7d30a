"""What the split must know of every row, gathered in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.columns import all_numbers
from flatout.engine.data.raw_texts import RawBatch
from flatout.engine.data.row_hashes import Hashes, content_hashes, group_hashes
from flatout.engine.data.rows import CheckedBatch

REJECTED, DUPLICATE = -1, -2
"""Codes of rows that are in no split; the splits' codes are their places in SPLITS."""
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class RowFacts:
    """What the first pass keeps of the good rows, N in all. About 41 bytes a row."""

    exact: Hashes
    """(N, 2) 128-bit hash of the text (and its pair)."""
    near: Hashes
    """(N,) hash of the text in one form."""
    groups: Hashes | None
    numbers: npt.NDArray[np.float64] | None
    """(N,) what a regression is to find."""
    labels: npt.NDArray[np.int32]
    """(N,) into `label_sets`."""
    label_sets: list[tuple[str, ...]]
    """What rows have: the name of a class, or those of several labels, sorted."""
    label_kinds: npt.NDArray[np.uint8]
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    rows: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int8]
    """(N,) codes of the splits that are given; -1 where none is."""
    given: frozenset[int]
    """Codes of all that are given, also of those without a good row."""
    num_raw: int
    number_text: str | None
    """The first text, where each is a number."""

    @property
    def are_given(self) -> bool:
        """Whether rows come with their splits."""
        return bool(self.given)

    def at(self, row: int) -> tuple[str, int]:
        """Where one of the N was read: its source, and its number there."""
        return self.source_names[self.sources[row]], int(self.rows[row])


class FactCollector:
    """Gathers RowFacts batch by batch."""

    def __init__(self) -> None:
        self.parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.label_codes: dict[tuple[str, ...], int] = {}
        self.source_codes: dict[str, int] = {}
        self.rejected: list[Any] = []
        self.given: set[int] = set()
        self.num_raw = 0
        self.number_text: str | None = None
        self._only_numbers = True

    def add(self, checked: CheckedBatch, batch: RawBatch) -> None:
        """The rows of `batch`, as `checked` has them."""
        table, source = checked.table, batch.source
        num_raw = len(batch.rows) + len(batch.broken)
        if num_raw:
            self.given |= {batch.split, *np.unique(checked.splits).tolist()} - {-1}
        exact, near = content_hashes(table)
        code = self.source_codes.setdefault(source, len(self.source_codes))
        self._keep(
            exact=exact,
            near=near,
            label_kinds=checked.label_kinds,
            labels=self._label_codes(table),
            sources=np.full(table.num_rows, code, np.int32),
            rows=table.column("source_row").to_numpy(),
            splits=checked.splits,
        )
        if _has_numbers(table):
            self._keep(numbers=table.column("label").to_numpy())
        if checked.groups is not None:
            self._keep(groups=group_hashes(checked.groups))
        if checked.rejected.num_rows:
            self.rejected.append(checked.rejected)
        if table.num_rows and self._only_numbers:
            texts = table.column("text")
            self._only_numbers = all_numbers(texts)
            self.number_text = texts[0].as_py() if self._only_numbers else None
        self.num_raw += num_raw

    def _keep(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self.parts.setdefault(name, []).append(array)

    def _label_codes(self, table: Any) -> npt.NDArray[np.int32]:
        kind = _label_kind(table)
        if kind is not None and pa.types.is_list(kind):
            sets = map(_set_of, table.column("label").to_pylist())
            return np.fromiter(map(self._code, sets), np.int32, table.num_rows)
        if kind is None or not pa.types.is_string(kind):
            return np.zeros(table.num_rows, np.int32)
        encoded = table.column("label").dictionary_encode()
        codes = [self._code((name,)) for name in encoded.dictionary.to_pylist()]
        found: npt.NDArray[np.int32] = np.array(codes, np.int32)[
            encoded.indices.to_numpy(zero_copy_only=False)
        ]
        return found

    def _code(self, names: tuple[str, ...]) -> int:
        return self.label_codes.setdefault(names, len(self.label_codes))

    def facts(self) -> RowFacts:
        joined: dict[str, Any] = {
            name: np.concatenate(parts) for name, parts in self.parts.items()
        }
        return RowFacts(
            **{"groups": None, "numbers": None, **joined},
            label_sets=list(self.label_codes),
            given=frozenset(self.given),
            source_names=list(self.source_codes),
            num_raw=self.num_raw,
            number_text=self.number_text,
        )


def _has_numbers(table: Any) -> bool:
    kind = _label_kind(table)
    return kind is not None and pa.types.is_floating(kind)


def _label_kind(table: Any) -> Any | None:
    names = table.schema.names
    return table.column("label").type if "label" in names else None


def _set_of(labels: list[Any]) -> tuple[str, ...]:
    """Of a row's labels; numbers are no names."""
    return tuple(sorted({label for label in labels if isinstance(label, str)}))
