"""Create the split report with row counts, rejection reasons, labels and leaks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from flatout.engine.data.labels import label_report
from flatout.engine.data.raw_texts import SOURCE, SPLITS, place
from flatout.engine.data.row_facts import (
    DROPPED,
    DUPLICATE,
    Codes,
    RowFacts,
    count_shared_values,
)
from flatout.engine.data.rows import NOTHING

SHOWN_REASONS = 20
"""Number of reasons listed in the error message if too many rows are rejected."""
LOGGED_REASONS = 3
SHOWN_TEXTS = 3


def split_report(
    facts: RowFacts, codes: Codes, rejected: Any, *, repeats: bool
) -> dict[str, Any]:
    """Return the report as a dict. Set `repeats` if the same text may occur in several
    rows and splits. Raises AssertionError if the counts do not add up to all raw rows,
    or if a text or a group is unexpectedly in two splits."""
    near = facts.near[codes >= 0]
    report = {
        **row_counts(facts, codes, rejected),
        "duplicates": int((codes == DUPLICATE).sum()),
        "near_duplicates": len(near) - len(np.unique(near)),
        "near_duplicates_in_two_splits": count_shared_values(facts.near, codes),
        "texts_in_two_splits": count_shared_values(facts.exact[:, 0], codes),
        "groups_in_two_splits": count_shared_values(facts.groups, codes),
        **label_report(facts, codes),
    }
    out = sum(report["rows_out"].values())
    accounted = out + sum(report[n] for n in ("rejected", "duplicates", "dropped"))
    if accounted != facts.num_raw:
        raise AssertionError(f"{facts.num_raw} rows in, {accounted} accounted for")
    leaks = 0 if repeats else report["texts_in_two_splits"]
    if (leaks or report["groups_in_two_splits"]) and not facts.are_given:
        raise AssertionError("a text or a group is in two splits")
    return report


def row_counts(facts: RowFacts, codes: Codes, rejected: Any) -> dict[str, Any]:
    """Return counts of the raw rows, the rows in each split, the rejected rows (in
    total and for each reason), and the rows left out by `split.drop_rows`."""
    out = {name: int((codes == code).sum()) for code, name in enumerate(SPLITS)}
    return {
        "rows_in": facts.num_raw,
        "rows_out": out,
        "rejected": rejected.num_rows,
        "dropped": int((codes == DROPPED).sum()),
        "rejected_by_reason": _counts(rejected),
    }


def leak_warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if the data has the same texts in more than one split."""
    if found := report.get("leaks", []):
        shown = "; ".join(" = ".join(rows) for rows in found[:SHOWN_TEXTS])
        more = "; ..." if len(found) > SHOWN_TEXTS else ""
        yield (
            f"texts that were given in more than one split: {shown}{more}; "
            "split_report lists them under leaks. split.on_leak: drop removes them "
            "from train"
        )


def _counts(rejected: Any) -> dict[str, int]:
    counted = rejected.column("reason").value_counts().to_pylist()
    pairs = [(entry["values"], entry["counts"]) for entry in counted]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def summary_text(report: Mapping[str, Any], rejected: Any) -> str:
    """Return a log message with the size of each split and the rejection reasons."""
    parts = ", ".join(f"{n:,} {name}" for name, n in report["rows_out"].items())
    counts = f"{report['rows_in']:,} rows in: {parts}; {report['rejected']:,} rejected"
    if "duplicates" in report:  # Samples of arrays and images may repeat.
        counts += f", {report['duplicates']:,} duplicates"
    if report["dropped"]:
        counts += f", {report['dropped']:,} left out by split.drop_rows"
    reasons = _reason_lines(report, rejected, LOGGED_REASONS)
    return "\n".join([counts, *(f"  rejected {line}" for line in reasons)])


def no_row_text(report: Mapping[str, Any], rejected: Any) -> str:
    """Return the error message for data without a usable row."""
    lines = _reason_lines(report, rejected, LOGGED_REASONS)
    why = "; ".join(lines) or "the data has no rows"
    return f"there is no row that can be used: {why}"


def too_many_text(
    report: Mapping[str, Any],
    rejected: Any,
    limit: float,
    quarantine: str = "rejected_rows",
) -> str:
    """Return the error message for too many rejected rows, with the reasons, the first
    rows rejected for each reason, and a suggested fix."""
    share = report["rejected"] / report["rows_in"]
    lines = _reason_lines(report, rejected, SHOWN_REASONS)
    return (
        f"{report['rejected']} of {report['rows_in']} rows ({share:.1%}) cannot be "
        f"used, more than split.max_rejected_fraction {limit:g}:\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"All of them are in {quarantine}. Correct the data or the column names, "
        "or raise split.max_rejected_fraction"
    )


def _reason_lines(report: Mapping[str, Any], rejected: Any, most: int) -> list[str]:
    """Return a line for each of the `most` most common reasons, and a line that counts
    the rows of the other reasons, if there are any."""
    reasons = list(report["rejected_by_reason"].items())
    lines = [_reason_line(reason, n, rejected) for reason, n in reasons[:most]]
    if rest := [count for _, count in reasons[most:]]:
        lines.append(f"{sum(rest)} x other reasons ({len(rest)})")
    return lines


def _reason_line(reason: str, count: int, rejected: Any) -> str:
    """Return a line such as `3 x label is missing: rows 2, 7, 9 (counted from 0), the
    first is 'text'`."""
    chosen = rejected.filter(pc.equal(rejected.column("reason"), reason)).slice(0, 5)
    first, *_ = rows = chosen.to_pylist()
    places = _places(rows, ", ..." if count > len(rows) else "")
    shown = first["excerpt"].strip()
    example = f", the first is {shown!r}" if shown not in NOTHING else ""
    return f"{count} x {reason}: rows {places} (counted from 0){example}"


def _places(rows: list[dict[str, Any]], more: str) -> str:
    """Return row numbers such as `2, 7, 9, ... of reviews.csv`. If the rows come from
    several files, each row number is prefixed with its file name."""
    sources = {row["source"] for row in rows}
    one = len(sources) == 1 and SOURCE not in sources
    named = [(SOURCE if one else r["source"], r["row"]) for r in rows]
    numbers = ", ".join(place(*where) for where in named)
    return f"{numbers}{more} of {sources.pop()}" if one else f"{numbers}{more}"


def split_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the report as flat metrics for a tracking server, with names such as
    `split_rejected/<reason>`."""
    names = ["rows_in", "rejected", "duplicates", "near_duplicates"]
    if "texts_with_several_labels" in report:
        names.append("texts_with_several_labels")
    metrics = {f"split_{name}": report[name] for name in names}
    metrics |= {f"split_rows_{name}": n for name, n in report["rows_out"].items()}
    for reason, count in report["rejected_by_reason"].items():
        name = f"split_rejected/{re.sub('[^A-Za-z0-9 _.-]', '', reason)}"
        metrics[name] = metrics.get(name, 0) + count
    return {name: float(value) for name, value in metrics.items()}
