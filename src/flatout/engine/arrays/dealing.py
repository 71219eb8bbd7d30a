"""Samples checked and dealt to train, validation and test, by their content alone.

A sample is hashed, and the hash, a number in [0, 1), compared with the fractions: it
keeps its split whatever comes beside it, and equal samples are in one split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.arrays.sample_facts import (
    SampleFacts,
    first_pass,
    name_of_class,
    rejected_row,
)
from flatout.engine.arrays.sources import ArraysError, ArraySource, Window
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.data.row_hashes import scrambled
from flatout.engine.data.rows import REJECTED_SCHEMA
from flatout.engine.parameters import SplitSettings
from flatout.engine.rows.layout import Ints
from flatout.engine.tasks import Task

REJECTED = -1
UNSEEN = "a label that no row of train has"
QUARANTINE = "rejected_images or rejected_arrays (data/02_intermediate)"


class Dealt:
    """Which split each sample goes to. Computed when first asked for, in one pass; the
    splits are read in one more each."""

    def __init__(
        self, source: ArraySource, settings: SplitSettings, task: Task
    ) -> None:
        self.source, self.settings, self.task = source, settings, task

    @cached_property
    def _facts(self) -> SampleFacts:
        return first_pass(self.source, self.task)

    @property
    def _has_classes(self) -> bool:
        return bool(pa.types.is_string(self.task.label_type))

    @cached_property
    def _decided(self) -> tuple[Ints, list[dict[str, Any]]]:
        """(N,) number of the split, or REJECTED; and all rows that are not used."""
        facts, fractions = self._facts, self.settings.fractions
        bounds = [fractions.train, fractions.train + fractions.validation]
        places = scrambled(facts.hashes, self.settings.seed).astype(float) / 2.0**64
        codes = np.searchsorted(bounds, places, side="right")
        codes[~facts.good] = REJECTED
        unseen = self._unseen(codes)
        codes[unseen] = REJECTED
        late = [
            rejected_row(*place, UNSEEN, facts.labels[row])
            for row, place in zip(unseen.tolist(), self._places(unseen), strict=True)
        ]
        return codes, [*facts.rejected, *late]

    def _unseen(self, codes: Ints) -> Ints:
        """Rows (n,) of classes that nothing could learn."""
        if not self._has_classes:
            return np.empty(0, np.int64)
        labels = self._facts.labels
        known = np.isin(labels, np.unique(labels[codes == 0]))
        return np.flatnonzero((codes >= 0) & ~known)

    def _places(self, rows: Ints) -> Iterator[tuple[str, int]]:
        """File of each of `rows` (n,), and row in it: read once more, for no window is
        kept."""
        start = 0
        for window in self.source.windows() if len(rows) else ():
            stop = start + len(window.values)
            for row in rows[(rows >= start) & (rows < stop)].tolist():
                yield window.place(row - start)
            start = stop

    def check_usable(self) -> None:
        """Raises ArraysError where too much was rejected, or a split is unusable."""
        (codes, rejected), total = self._decided, len(self._facts.good)
        if not self._facts.good.any():
            raise ArraysError(_nothing_text(rejected))
        if len(rejected) > self.settings.max_rejected_fraction * total:
            limit = self.settings.max_rejected_fraction
            raise ArraysError(_too_many_text(rejected, total, limit))
        empty = [name for n, name in enumerate(SPLITS) if not (codes == n).any()]
        if empty:
            raise ArraysError(
                f"no sample fell into {' and '.join(empty)}: {total} are too few for "
                "split.fractions. Add samples, or raise the fraction"
            )
        classes = set(self._facts.labels[codes == 0]) if self._has_classes else ()
        if len(classes) == 1:
            raise ArraysError(
                f"{one_class_text(*classes)}. What cannot be used of others is in "
                f"{QUARANTINE}"
            )

    def windows(self, split: str) -> Iterator[tuple[Window, Ints, npt.NDArray[Any]]]:
        """Windows, the rows (n,) in them that are of `split`, and their labels. Raises
        ArraysError."""
        self.check_usable()
        start, number = 0, SPLITS.index(split)
        for window in self.source.windows():
            stop = start + len(window.values)
            rows = np.flatnonzero(self._decided[0][start:stop] == number)
            if len(rows):
                yield window, rows, self._facts.labels[start:stop][rows]
            start = stop

    def values(self, window: Window, rows: Ints) -> npt.NDArray[Any]:
        """Samples (n, ...) of `rows` (n,), as all files can give them."""
        return window.values[rows].astype(self._facts.dtype, copy=False)

    @property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA."""
        return pa.Table.from_pylist(self._decided[1], REJECTED_SCHEMA)

    @property
    def report(self) -> dict[str, Any]:
        """Counts by split, reason and label. Raises ArraysError."""
        self.check_usable()
        (codes, rejected), facts = self._decided, self._facts
        reasons = Counter(row["reason"] for row in rejected)
        kinds = {}
        if self._has_classes:
            kinds = {
                name: dict(Counter(facts.labels[codes == number].tolist()))
                for number, name in enumerate(SPLITS)
            }
        hashes = facts.hashes[facts.good]
        return {
            "shape": list(facts.shape or ()),
            "rows_in": len(codes),
            "rows_out": {n: int((codes == i).sum()) for i, n in enumerate(SPLITS)},
            "rejected": len(rejected),
            "reasons": dict(reasons.most_common()),
            "repeated": len(hashes) - len(np.unique(hashes)),
            "labels": kinds,
            **self.source.told(),
        }


def one_class_text(name: str) -> str:
    """Of a training that has nothing to learn."""
    return (
        f"all samples are of one class, {name!r}: there is nothing to tell apart. Add "
        "samples of another, or take model.task: regression"
    )


def _nothing_text(rejected: list[dict[str, Any]]) -> str:
    told = (f"{r['source']}, row {r['row']}: {r['reason']}" for r in rejected)
    why = next(told, "there are none at all")
    return f"there is no sample that can be used; {why}"


def _too_many_text(rejected: list[dict[str, Any]], total: int, limit: float) -> str:
    reasons = Counter(row["reason"] for row in rejected)
    told = "; ".join(f"{count} {why}" for why, count in reasons.most_common(3))
    first = rejected[0]
    return (
        f"{len(rejected)} of {total} samples cannot be used, more than "
        f"split.max_rejected_fraction ({limit:g}) allows: {told}. The first is row "
        f"{first['row']} of {first['source']}; all are in {QUARANTINE}. Mend them, or "
        "raise the fraction"
    )


def label_names_of(source: ArraySource, task: Task) -> list[str]:
    """Distinct names, sorted; as numbers where all of them are. Empty for numbers."""
    if task.label_type is None or not pa.types.is_string(task.label_type):
        return []
    names = {
        name for label in source.labels() if (name := name_of_class(label)) is not None
    }
    try:
        return sorted(names, key=lambda name: (int(name), name))  # 01 is not 1
    except ValueError:
        return sorted(names)
