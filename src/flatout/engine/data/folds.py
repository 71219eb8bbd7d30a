"""Cross-validation folds. Each row is a test row in exactly one fold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flatout.engine.data.row_facts import Codes, RowFacts, scrambled

FOLD = "fold"
"""Name of the column with each row's fold number, counted from 0."""


def assign_folds(
    facts: RowFacts, codes: Codes, folds: int, seed: int
) -> npt.NDArray[np.int8]:
    """Return the fold number of each row (N,), or -1 for rows that are in no split.

    Folds are stratified by label, as in scikit-learn's StratifiedKFold. Rows of the
    same group count as one row with the label of the first. If the data has no groups,
    texts that differ only in case and whitespace form a group.
    """
    used = np.flatnonzero(codes >= 0)
    hashes = (facts.near if facts.groups is None else facts.groups)[used]
    units, first, unit, sizes = np.unique(hashes, True, True, True)
    labels = facts.labels[used][first]
    ranks = np.argsort(np.lexsort((scrambled(units, seed), sizes, labels)))
    found = np.full(len(codes), -1, np.int8)
    found[used] = (ranks % folds)[unit]
    return found


def folds_fault(
    facts: RowFacts, assigned: npt.NDArray[np.int8], folds: int, *, has_classes: bool
) -> str | None:
    """Return the reason why the fold numbers (N,) cannot be used, or None."""
    if facts.are_given:
        return (
            "split.folds: the data gives the split of each row. Set split.folds: null, "
            "or remove split.split_column or the entries raw_validation_texts and "
            "raw_test_texts"
        )
    used = assigned >= 0
    labels = facts.labels[used] * has_classes
    pairs = np.unique(np.stack([labels, assigned[used]]), axis=1)
    codes, counts = np.unique(pairs[0], return_counts=True)
    least = int(counts.min())
    if least >= folds:
        return None
    label = facts.label_sets[codes[counts.argmin()]] if has_classes else ("the data",)
    return (
        f"split.folds={folds}: {label[0]!r} has different texts or groups for only "
        f"{least} folds. Set split.folds to at most {max(2, least)}, or give more rows"
    )
