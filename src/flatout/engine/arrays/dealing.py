"""Samples checked and dealt to train, validation and test, by their content alone.

A sample is hashed, and the hash, a number in [0, 1), compared with the fractions: it
keeps its split whatever comes beside it, and equal samples are in one split.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flatout.engine.arrays.sources import ArraysError, ArraySource, Window
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.data.row_hashes import scrambled
from flatout.engine.data.rows import REJECTED_SCHEMA
from flatout.engine.parameters import SplitSettings
from flatout.engine.rows.layout import Ints
from flatout.engine.tasks import Task

logger = logging.getLogger(__name__)

REJECTED = -1
UNSEEN = "a label that no row of train has"


@dataclass(frozen=True)
class _Facts:
    """Of all rows: (N,) each."""

    hashes: npt.NDArray[np.uint64]
    labels: npt.NDArray[Any]
    shape: tuple[int, ...]
    rejected: list[dict[str, Any]]
    good: npt.NDArray[np.bool_]


class Dealt:
    """Which split each sample goes to. Computed when first asked for, in one pass; the
    splits are read in one more each."""

    def __init__(
        self, source: ArraySource, settings: SplitSettings, task: Task
    ) -> None:
        self.source, self.settings, self.task = source, settings, task

    @cached_property
    def _facts(self) -> _Facts:
        return _first_pass(self.source, self.task)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self._facts.shape

    @cached_property
    def codes(self) -> Ints:
        """(N,) number of the split, or REJECTED. Raises ArraysError."""
        facts, fractions = self._facts, self.settings.fractions
        bounds = [fractions.train, fractions.train + fractions.validation]
        places = scrambled(facts.hashes, self.settings.seed).astype(float) / 2.0**64
        codes = np.searchsorted(bounds, places, side="right")
        codes[~facts.good] = REJECTED
        self._reject_unseen(codes)
        self._check(codes)
        return codes

    def _reject_unseen(self, codes: Ints) -> None:
        """Classes that nothing could learn."""
        if not pa.types.is_string(self.task.label_type):
            return
        labels = self._facts.labels
        known = np.isin(labels, np.unique(labels[codes == 0]))
        for row in np.flatnonzero((codes >= 0) & ~known).tolist():
            codes[row] = REJECTED
            self._facts.rejected.append(_rejected("", row, UNSEEN, labels[row]))

    def _check(self, codes: Ints) -> None:
        total, rejected = len(codes), int((codes == REJECTED).sum())
        limit = self.settings.max_rejected_fraction
        if rejected > limit * total:
            reasons = Counter(row["reason"] for row in self._facts.rejected)
            told = "; ".join(f"{count} {why}" for why, count in reasons.most_common(3))
            first = self._facts.rejected[0]
            raise ArraysError(
                f"{rejected} of {total} samples cannot be used, more than "
                f"split.max_rejected_fraction ({limit:g}) allows: {told}. The first is "
                f"row {first['row']} of {first['source']}"
            )
        empty = [name for n, name in enumerate(SPLITS) if not (codes == n).any()]
        if empty:
            raise ArraysError(
                f"no sample fell into {' and '.join(empty)}: {total} are too few for "
                "split.fractions"
            )

    def windows(self, split: str) -> Iterator[tuple[Window, Ints, npt.NDArray[Any]]]:
        """Windows, the rows (n,) in them that are of `split`, and their labels."""
        start, number = 0, SPLITS.index(split)
        for window in self.source.windows():
            stop = start + len(window.values)
            rows = np.flatnonzero(self.codes[start:stop] == number)
            if len(rows):
                yield window, rows, self._facts.labels[start:stop][rows]
            start = stop

    @property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA."""
        _ = self.codes
        return pa.Table.from_pylist(self._facts.rejected, REJECTED_SCHEMA)

    @property
    def report(self) -> dict[str, Any]:
        """Counts by split, reason and label."""
        codes, facts = self.codes, self._facts
        reasons = Counter(row["reason"] for row in facts.rejected)
        kinds = {}
        if pa.types.is_string(self.task.label_type):
            kinds = {
                name: dict(Counter(facts.labels[codes == number].tolist()))
                for number, name in enumerate(SPLITS)
            }
        return {
            "shape": list(facts.shape),
            "rows_in": len(codes),
            "rows_out": {n: int((codes == i).sum()) for i, n in enumerate(SPLITS)},
            "rejected": int((codes == REJECTED).sum()),
            "reasons": dict(reasons.most_common()),
            "repeated": len(codes) - len(np.unique(facts.hashes)),
            "labels": kinds,
            **self.source.told(),
        }


def label_names_of(source: ArraySource, task: Task) -> list[str]:
    """Distinct names, sorted; as numbers where all of them are. Empty for numbers."""
    if task.label_type is None or not pa.types.is_string(task.label_type):
        return []
    names = {name for label in source.labels() if (name := _name(label)) is not None}
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def _first_pass(source: ArraySource, task: Task) -> _Facts:
    hashes, labels, good = [], [], []
    rejected: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    for window in source.windows():
        if shape is None and len(window.faults) < len(window.values):
            shape = window.values.shape[1:]
        faults = _faults(window, shape, task)
        rows = len(window.values)
        hashes.append(_hashes(window.values))
        good.append(~np.isin(np.arange(rows), list(faults)))
        labels.append(_labels(window, task))
        rejected += [
            _rejected(*window.place(row), why, "")
            for row, why in sorted(faults.items())
        ]
    if shape is None:
        told = (f"{r['source']}, row {r['row']}: {r['reason']}" for r in rejected)
        why = next(told, "there are none at all")
        raise ArraysError(f"there is no sample that can be used; {why}")
    return _Facts(
        np.concatenate(hashes),
        np.concatenate(labels),
        shape,
        rejected,
        np.concatenate(good),
    )


def _faults(
    window: Window, shape: tuple[int, ...] | None, task: Task
) -> dict[int, str]:
    """Row of the window -> why it cannot be used."""
    found = window.faults_for(shape)
    if task.label_type is not None:
        read = _name if pa.types.is_string(task.label_type) else _number
        told = window.labels or [None] * len(window.values)
        for row, label in enumerate(told):
            if read(label) is None:
                found.setdefault(row, "no label")
    return found


def _hashes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    rows = np.ascontiguousarray(values)
    return np.array(
        [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64
    )


def _labels(window: Window, task: Task) -> npt.NDArray[Any]:
    count = len(window.values)
    told = window.labels or [None] * count
    if task.label_type is None or pa.types.is_string(task.label_type):
        return np.array([_name(label) or "" for label in told], dtype=object)
    numbers = (_number(label) for label in told)
    return np.array([np.nan if n is None else n for n in numbers], np.float64)


def _name(label: Any) -> str | None:
    """3.0 is called 3."""
    if label is None or label != label:  # noqa: PLR0124 - NaN
        return None
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    whole = isinstance(label, float) and label.is_integer()
    return str(int(label)) if whole else str(label).strip() or None


def _number(label: Any) -> float | None:
    try:
        found = float(label)
    except (TypeError, ValueError):
        return None
    return found if np.isfinite(found) else None


def _rejected(source: str, row: int, reason: str, excerpt: Any) -> dict[str, Any]:
    return {
        "source": source,
        "row": row,
        "line": None,
        "reason": reason,
        "excerpt": str(excerpt),
    }
