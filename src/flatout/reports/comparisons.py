"""Sections of the benchmark report that compare training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from flatout.engine.benchmark.pairs import ALONE
from flatout.reports.markdown import Columns, Row, cell_text, section, table, times

ALTERNATING = (
    "Alternating: the median ratio between windows with this rung and windows with "
    "the kept rungs below it (for the last lines: with conf/slow). ± %: width of the "
    "middle half of these ratios. Total: the product."
)


def ladder_text(steps: pd.DataFrame) -> str:
    """Return the table of rungs with the gain of each, or the reason why it failed."""
    if steps.empty:
        return ""
    rows = steps.fillna({"note": ""}).to_dict("records")
    columns: Columns = {
        "rung": lambda row: (
            f"{row['name']}{' (another optimisation)' * row['changes_optimisation']}"
        ),
        "samples/s": "samples_per_s",
        "alternating": times("individual"),
        "± %": "spread_pct",
        "total": times("cumulative"),
        "kept": lambda row: "yes" if row["kept"] and row["status"] == "ok" else "no",
    }
    if any(_end(row) != "ok" for row in rows):
        columns = {**columns, "status": _end}
    return section("Ladder", table(rows, columns), ALTERNATING)


def _end(row: Row) -> str:
    if row["status"] == "ok":
        return f"ok, {ALONE}" if ALONE in row["note"] else "ok"
    return cell_text(f"{row['status']}: {row['note']}")


TRIALS = {
    "trial": "trial_id",
    "label": "label",
    "kind": "kind",
    "devices": "world_size",
    "batch": "global_batch_size",
    "strategy": "strategy",
    "budget": "token_budget",
    "workers": "num_workers",
    "ahead": "prefetch_factor",
    "pinned": "pin_memory",
    "type": "precision",
    "I/O ms": "io_ms",
    "forward ms": "forward_ms",
    "backward ms": "backward_ms",
    "optim. ms": "optimizer_ms",
    "total ms": "total_ms",
    "samples/s": "samples_per_s",
    "loader/s": "loader_samples_per_s",
    "GPU %": "gpu_util_pct",
    "GiB": "reserved_memory_gib",
    "status": "status",
    "note": "note",
}
IF_THEY_DIFFER = ("ahead", "pinned", "devices")


def trials_text(rows: Sequence[Row]) -> str:
    """Return the table of trials with the columns that contain information."""
    return section("Trials", table(rows, with_values(TRIALS, rows))) if rows else ""


def with_values(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns that contain information for these rows."""
    values = {head: {row[name] for row in rows} for head, name in columns.items()}
    return {
        head: name
        for head, name in columns.items()
        if values[head] != {None}
        and (head not in IF_THEY_DIFFER or len(values[head]) > 1)
    }
