"""Check the labels of all rows, and report how often each label occurs and which texts
have several labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.data.raw_texts import SPLITS, named_row
from flatout.engine.data.row_facts import REJECTED, Codes, RowFacts, first_rows
from flatout.engine.data.rows import rejected_batch

SHOWN_TEXTS = 3


def ordered_names(names: Sequence[str]) -> list[str]:
    """Return label names in numeric order if all are finite numbers, otherwise in
    alphabetical order. Names of equal numbers, such as 01 and 1, are in alphabetical
    order, so that the order of the rows does not matter."""
    found = sorted(names)
    for number in (int, _finite):  # int is exact even for long numbers.
        try:
            return sorted(found, key=number)
        except ValueError:
            continue
    return found


def _finite(name: str) -> float:
    if math.isfinite(number := float(name)):
        return number
    raise ValueError(name)


def reject_labels(facts: RowFacts, codes: Codes) -> list[Any]:
    """Reject the validation and test rows with a label that no row of train has. Set
    their codes in `codes` (N,) to REJECTED, and return them as record batches."""
    if not facts.label_sets:
        return []
    learnt = label_counts(facts, codes == 0).keys()
    unseen = np.array([not learnt >= {*names} for names in facts.label_sets])
    chosen = (codes > 0) & unseen[facts.labels]
    codes[chosen] = REJECTED
    reason = "label has no row in the train split"
    found = [
        (*facts.at(row), reason, ", ".join(facts.labels_of(row)))
        for row in np.flatnonzero(chosen).tolist()
    ]
    return [rejected_batch(found)] if found else []


def label_report(facts: RowFacts, codes: Codes) -> dict[str, Any]:
    """Return the part of the split report about labels. If the labels are numbers, it
    contains only the texts that occur with several labels."""
    several = _several_labels(facts)
    if not facts.label_sets:
        return several if facts.numbers is not None else {}
    shares = {}
    for code, split in enumerate(SPLITS):
        counts = sorted(label_counts(facts, codes == code).items())
        size = int((codes == code).sum())
        shares[split] = {name: round(count / size, 6) for name, count in counts}
    labels = len(label_counts(facts, codes >= 0))
    return {"labels": labels, "label_shares": shares, **several}


def label_counts(facts: RowFacts, chosen: npt.NDArray[np.bool_]) -> Counter[str]:
    """Return how many of the rows in the mask `chosen` (N,) have each label name."""
    found: Counter[str] = Counter()
    counts = np.bincount(facts.labels[chosen], minlength=len(facts.label_sets))
    for names, count in zip(facts.label_sets, counts.tolist(), strict=True):
        found.update(dict.fromkeys(names, count) if count else {})
    return found


def _several_labels(facts: RowFacts) -> dict[str, Any]:
    starts = first_rows(facts.exact)
    labels = facts.labels if facts.numbers is None else facts.numbers
    odd = np.flatnonzero(labels != labels[starts])
    texts, at = np.unique(starts[odd], return_index=True)
    pairs = np.stack([texts, odd[at]], axis=1)[:SHOWN_TEXTS].tolist()
    return {
        "texts_with_several_labels": len(texts),
        "several_labels_at": [[_shown(facts, row) for row in pair] for pair in pairs],
    }


def _shown(facts: RowFacts, row: int) -> str:
    """Return the labels and the number of a row as text: `'good' in row 5`."""
    if facts.numbers is not None:
        label = f"{facts.numbers[row]:g}"
    else:
        label = ", ".join(map(repr, facts.labels_of(row))) or "none"
    return f"{label} in {named_row(facts.at(row))}"


def label_warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if the report lists texts that occur with several labels."""
    several = report.get("texts_with_several_labels", 0)
    if several:
        shown = [" and ".join(pair) for pair in report["several_labels_at"]]
        more = "; ..." if several > len(shown) else ""
        used = "All of these rows are used"  # for given splits or split.keep_duplicates
        if report["duplicates"]:
            used = "The first row of each is used, the others count as duplicates"
        yield (
            f"texts that came with several labels: {several:,} ({'; '.join(shown)}"
            f"{more}). {used}: give each text one label"
        )
