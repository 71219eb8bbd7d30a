"""Labels that only a look at the whole data shows to be of no use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.data.raw_texts import Kind
from flatout.engine.data.row_facts import RowFacts
from flatout.engine.data.rows import rejected_batch
from flatout.engine.data.split_report import REJECTED, Codes


def reject_labels(facts: RowFacts, codes: Codes) -> list[Any]:
    """Batches of rejected rows, which get the code REJECTED in `codes` (N,)."""
    return [*_reject_odd_kinds(facts, codes), *_reject_unseen(facts, codes)]


def _reject_odd_kinds(facts: RowFacts, codes: Codes) -> list[Any]:
    """Labels that are text where most are numbers, or the other way round."""
    used = codes >= 0
    numbers = used & (facts.label_kinds == Kind.NUMBER)
    texts = used & (facts.label_kinds == Kind.TEXT)
    if not numbers.any() or not texts.any():
        return []
    if numbers.sum() >= texts.sum():
        return _reject(facts, codes, texts, "is text where most labels are numbers")
    return _reject(facts, codes, numbers, "is a number where most labels are text")


def _reject_unseen(facts: RowFacts, codes: Codes) -> list[Any]:
    """Labels without a row in train: nothing could learn them."""
    size = len(facts.label_names)
    in_train = np.bincount(facts.labels[codes == 0], minlength=size) > 0
    unseen = (codes > 0) & ~in_train[facts.labels]
    return _reject(facts, codes, unseen, "has no row in the train split")


def _reject(
    facts: RowFacts, codes: Codes, chosen: npt.NDArray[np.bool_], what: str
) -> list[Any]:
    codes[chosen] = REJECTED
    batches = []
    for code, source in enumerate(facts.source_names):
        here = np.flatnonzero(chosen & (facts.sources == code))
        names = [facts.label_names[label] for label in facts.labels[here]]
        rows = facts.rows[here].tolist()
        found = [(r, f"label {what}", n) for r, n in zip(rows, names, strict=True)]
        batches += [rejected_batch(source, found)] if found else []
    return batches
