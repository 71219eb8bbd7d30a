"""Labels that only a look at the whole data shows to be of no use, and what is said of
the others: shares, labels that are seen only once, texts that came with several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.data.raw_texts import Kind, RowNumber, named_row
from flatout.engine.data.row_facts import REJECTED, Codes, RowFacts
from flatout.engine.data.row_hashes import first_rows
from flatout.engine.data.rows import rejected_batch

SHOWN_LABELS = 5
SHOWN_TEXTS = 3


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
    seen = np.unique(facts.labels[codes == 0]).tolist() if facts.label_sets else []
    learnt = {name for code in seen for name in facts.label_sets[code]}
    unseen = np.array([not learnt.issuperset(s) for s in facts.label_sets], dtype=bool)
    if not len(unseen):
        return []
    found = (codes > 0) & unseen[facts.labels]
    return _reject(facts, codes, found, "has no row in the train split")


def _reject(
    facts: RowFacts, codes: Codes, chosen: npt.NDArray[np.bool_], what: str
) -> list[Any]:
    codes[chosen] = REJECTED
    found = [
        (*facts.at(row), f"label {what}", ", ".join(facts.labels_of(row)))
        for row in np.flatnonzero(chosen).tolist()
    ]
    return [rejected_batch(found)] if found else []


@dataclass(frozen=True)
class _Names:
    """The labels in `RowFacts.label_sets`: flat pairs of a set and a name in it."""

    names: list[str]
    """Sorted."""
    sets: npt.NDArray[np.int64]
    members: npt.NDArray[np.int64]
    """Into `names`."""

    @classmethod
    def of(cls, sets: Sequence[tuple[str, ...]]) -> _Names:
        names = sorted({name for one in sets for name in one})
        numbers = {name: number for number, name in enumerate(names)}
        pairs = [(at, numbers[name]) for at, one in enumerate(sets) for name in one]
        flat = np.array(pairs, np.int64).reshape(-1, 2)
        return cls(names, flat[:, 0], flat[:, 1])

    def rows_of(self, labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Rows that have each of the names, among rows with `labels` (n,)."""
        counts = np.bincount(labels, minlength=int(self.sets.max(initial=-1)) + 1)
        weights = counts[self.sets]
        found = np.bincount(self.members, weights, minlength=len(self.names))
        return found.astype(np.int64)

    def seen_once(self, labels: npt.NDArray[np.int32]) -> dict[str, int]:
        """Names of one row only, and its place in `labels` (n,)."""
        once = self.rows_of(labels) == 1
        found, first = np.unique(labels, return_index=True)
        places = np.full(int(self.sets.max(initial=-1)) + 1, -1)
        named = found < len(places)  # behind them are sets of nothing
        places[found[named]] = first[named]
        at = places[self.sets]
        pairs = np.flatnonzero(once[self.members] & (at >= 0)).tolist()
        return {self.names[self.members[p]]: int(at[p]) for p in pairs}


@dataclass(frozen=True)
class LabelFindings:
    """Rows whose labels are spoken of, by their places among the good rows."""

    once: dict[str, RowNumber]
    """Labels that are seen only once."""
    num_texts: int
    """Texts that came with several labels."""
    several: list[tuple[str, RowNumber]]
    """Of the first SHOWN_TEXTS of these two labels each, in turn."""


def label_findings(facts: RowFacts, codes: Codes) -> LabelFindings:
    """What the report says of labels."""
    used = np.flatnonzero(codes >= 0)
    labels, known = facts.labels[used], _Names.of(facts.label_sets)
    once = known.seen_once(labels)
    named = {name: facts.at(used[place]) for name, place in once.items()}
    # Of the rows of one text the first is used, the others are duplicates.
    starts = first_rows(facts.exact)
    told = facts.labels if facts.numbers is None else facts.numbers
    odd = np.flatnonzero(told != told[starts])
    texts, at = np.unique(starts[odd], return_index=True)
    pairs = np.stack([texts, odd[at]], axis=1)[:SHOWN_TEXTS].ravel().tolist()
    several = [(_label_of(facts, row), facts.at(row)) for row in pairs]
    return LabelFindings(named, len(texts), several)


def _label_of(facts: RowFacts, row: int) -> str:
    if facts.numbers is None:
        return ", ".join(map(repr, facts.labels_of(row))) or "none"
    return f"{facts.numbers[row]:g}"


def label_report(
    facts: RowFacts,
    codes: Codes,
    splits: Sequence[str],
    findings: LabelFindings,
) -> dict[str, Any]:
    """Figures of the labels, as far as they are names; none where there are none."""
    shown = [f"{label} in {named_row(row)}" for label, row in findings.several]
    several = {
        "texts_with_several_labels": findings.num_texts,
        "several_labels_at": [shown[at : at + 2] for at in range(0, len(shown), 2)],
    }
    if not facts.label_sets:
        return several if facts.numbers is not None else {}
    known = _Names.of(facts.label_sets)
    places = {name: named_row(row) for name, row in findings.once.items()}
    return {
        "labels": int((known.rows_of(facts.labels[codes >= 0]) > 0).sum()),
        "label_shares": {
            split: _shares(known, facts.labels[codes == code])
            for code, split in enumerate(splits)
        },
        "labels_seen_once": dict(sorted(places.items())),
        **several,
    }


def _shares(known: _Names, labels: npt.NDArray[np.int32]) -> dict[str, float]:
    """Share of the rows with `labels` (n,) that have each name."""
    shares = known.rows_of(labels) / max(1, len(labels))
    pairs = zip(known.names, shares.tolist(), strict=True)
    return {name: round(share, 6) for name, share in pairs if share}


def label_warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """One line a finding, however many labels it is about."""
    several = report.get("texts_with_several_labels", 0)
    if several:
        shown = [" and ".join(pair) for pair in report["several_labels_at"]]
        more = "; ..." if several > len(shown) else ""
        yield (
            f"texts that came with several labels: {several:,} ({'; '.join(shown)}"
            f"{more}). The first row of each is used, the others count as duplicates: "
            "give each text one label"
        )
    once = report.get("labels_seen_once", {})
    if once:
        shown = [f"{name!r} in {at}" for name, at in once.items()][:SHOWN_LABELS]
        more = ", ..." if len(once) > len(shown) else ""
        yield f"labels seen only once: {len(once):,} ({', '.join(shown)}{more})"
