"""What is said of the labels: shares, labels that are seen only once, and texts that
came with several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.data.raw_texts import SOURCE
from flatout.engine.data.row_facts import RowFacts
from flatout.engine.data.row_hashes import first_rows

SHOWN_LABELS = 5
SHOWN_TEXTS = 3


def label_report(
    facts: RowFacts, codes: npt.NDArray[np.int8], splits: Sequence[str]
) -> dict[str, Any]:
    """Figures of the labels, as far as they are names; none where there are none."""
    if not facts.label_names:
        return _several_labels(facts) if facts.numbers is not None else {}
    used = np.flatnonzero(codes >= 0)
    found, first, counts = np.unique(
        facts.labels[used], return_index=True, return_counts=True
    )
    once = counts == 1
    pairs = zip(found[once].tolist(), used[first[once]].tolist(), strict=True)
    places = {facts.label_names[label]: place_of(facts, row) for label, row in pairs}
    return {
        "labels": len(found),
        "label_shares": {
            split: _shares(facts, codes == code) for code, split in enumerate(splits)
        },
        "labels_seen_once": dict(sorted(places.items())),
        **_several_labels(facts),
    }


def _several_labels(facts: RowFacts) -> dict[str, Any]:
    """How many texts came with more than one label, and where the first of them are.
    Of the rows of such a text the first is used, the others are duplicates."""
    first = first_rows(facts.exact)
    labels = facts.labels if facts.numbers is None else facts.numbers
    odd = np.flatnonzero(labels != labels[first])
    texts, at = np.unique(first[odd], return_index=True)
    pairs = zip(texts[:SHOWN_TEXTS].tolist(), odd[at].tolist(), strict=False)
    return {
        "texts_with_several_labels": len(texts),
        "several_labels_at": [
            [_label_at(facts, row) for row in pair] for pair in pairs
        ],
    }


def _label_at(facts: RowFacts, row: int) -> str:
    if facts.numbers is None:
        label = repr(facts.label_names[facts.labels[row]])
    else:
        label = f"{facts.numbers[row]:g}"
    return f"{label} in row {place_of(facts, row)}"


def _shares(facts: RowFacts, chosen: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Share of each label among the chosen rows."""
    counts = np.bincount(facts.labels[chosen], minlength=len(facts.label_names))
    shares = counts / max(1, int(counts.sum()))
    pairs = zip(facts.label_names, shares.tolist(), strict=True)
    return {name: round(share, 6) for name, share in sorted(pairs) if share}


def place_of(facts: RowFacts, row: int) -> str:
    """Where a good row was read."""
    return place(facts.source_names[facts.sources[row]], int(facts.rows[row]))


def place(source: str, row: int) -> str:
    """A row's number, with the name of the shard where it comes from a file."""
    return str(row) if source == SOURCE else f"{source}:{row}"


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
        shown = [f"{name!r} in row {at}" for name, at in once.items()][:SHOWN_LABELS]
        more = ", ..." if len(once) > len(shown) else ""
        yield f"labels seen only once: {len(once):,} ({', '.join(shown)}{more})"
