"""Sections of the report that compare trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flatout.engine.benchmark.pairs import ALONE, ratio
from flatout.engine.benchmark.tune import FREE_LOADER, LOADER_MARGIN
from flatout.reports.markdown import (
    Columns,
    Row,
    cell_text,
    counted,
    number_text,
    section,
    table,
    time_text,
    times,
)

Summary = Mapping[str, Any]

ALTERNATING = (
    "Alternating: the median ratio between windows with this rung and windows with "
    "the kept rungs below it (for the last lines: with conf/slow). ± %: width of the "
    "middle half of these ratios. Total: the product."
)


def ladder_text(steps: pd.DataFrame) -> str:
    """Describe the gain of each rung, and its fault if it failed."""
    if steps.empty:
        return ""
    texts = {"source": "", "claim": "", "note": ""}
    rows = steps.fillna(texts).to_dict("records")
    columns: Columns = {
        "rung": _rung_name,
        "guide": "source",
        "claimed": "claim",
        "samples/s": "samples_per_s",
        "alternating": times("individual"),
        "± %": "spread_pct",
        "total": times("cumulative"),
        "kept": lambda row: "yes" if row["kept"] and row["status"] == "ok" else "no",
    }
    if any(_end(row) != "ok" for row in rows):
        columns = {**columns, "status": _end}
    return section("Ladder", table(rows, columns), ALTERNATING)


def _rung_name(row: Row) -> str:
    other = " (another optimisation)" if row["changes_optimisation"] else ""
    return f"{row['name']}{other}"


def _end(row: Row) -> str:
    if row["status"] == "ok":
        return f"ok, {ALONE}" if ALONE in row["note"] else "ok"
    return cell_text(f"{row['status']}: {row['note']}")


def loader_text(summary: Summary, trials: pd.DataFrame) -> str:
    """Compare the loader's speed with the steps."""
    rows = _loader_rows(summary, trials)
    columns: Columns = {"workers": "num_workers", "samples/s": "samples_per_s"}
    columns = {**columns, "of the steps' rate": times("times")}
    return section("Loader", table(rows, columns)) if rows else ""


def _loader_rows(summary: Summary, trials: pd.DataFrame) -> list[Row]:
    """Return the loader's trials; `times`: their rate by that of the steps."""
    needed = _steps_rate(trials, summary["global_batch_size"])
    return [
        {**row, "needed": needed, "times": ratio(row["samples_per_s"], needed)}
        for row in summary["loader"]
    ]


def _steps_rate(trials: pd.DataFrame, global_batch_size: int) -> float | None:
    """Return the highest rate of steps per device: the required loader rate."""
    if trials.empty:
        return None
    alone = trials[(trials["kind"] == "compute") & (trials["status"] == "ok")]
    alone = alone[alone["global_batch_size"] == global_batch_size]
    rate = (alone["samples_per_s"] / alone["world_size"]).max()
    return None if pd.isna(rate) else float(rate)


def loader_answer(summary: Summary, trials: pd.DataFrame) -> str:
    """Return the result by the rule with which mode tune chooses workers."""
    if not summary["loader"]:
        return "The loader was not measured."
    rows = [row for row in _loader_rows(summary, trials) if row["times"]]
    if not rows:
        return "The rate of steps without the loader was not measured."
    for row in rows:
        if row["times"] >= (LOADER_MARGIN if row["num_workers"] else FREE_LOADER):
            return f"Fast enough: {_loader_rate(row)}."
    return (
        f"Not fast enough: at best {_loader_rate(max(rows, key=lambda r: r['times']))}."
        f" Steps do not wait for a loader of {LOADER_MARGIN:g} times their rate, or of "
        f"{FREE_LOADER:g} times without workers."
    )


def _loader_rate(row: Row) -> str:
    return (
        f"with {counted(row['num_workers'], 'worker')} the loader reaches "
        f"{row['times']:.1f} times the {number_text(row['needed'])} samples/s that "
        "steps need on one device"
    )


def scaling_text(summary: Summary) -> str:
    columns: Columns = {
        "devices": "devices",
        "samples/s": "samples_per_s",
        "% of linear": lambda row: (
            number_text(100 * row["share_of_linear"])
            if row["share_of_linear"]
            else row["status"]
        ),
    }
    rows = summary["scaling"]
    return section("Scaling", table(rows, columns)) if rows else ""


def time_to_train_text(summary: Summary) -> str:
    """Compare the hours before and after with the deadline."""
    rows = summary["time_to_train"]
    if not rows:
        return ""
    epochs, deadline = rows[0]["epochs"], rows[0]["deadline_hours"]
    columns: Columns = {
        "rows": lambda row: f"{row['rows']:,}",
        "before": lambda row: time_text(row["hours_before"]),
        "after": lambda row: time_text(row["hours_after"]),
        f"within {deadline:g} h": lambda row: "yes" if row["in_time"] else "no",
    }
    note = "Time of the steps, without evaluation, checkpoints and start-up."
    title = f"Time to train {counted(epochs, 'epoch')}"
    return section(title, table(rows, columns), note)


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
    """Return the table of trials with informative columns; devices if they differ."""
    return section("Trials", table(rows, with_values(TRIALS, rows))) if rows else ""


def with_values(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns with information on these rows."""
    values = {head: {row[name] for row in rows} for head, name in columns.items()}
    return {
        head: name
        for head, name in columns.items()
        if values[head] != {None}
        and (head not in IF_THEY_DIFFER or len(values[head]) > 1)
    }
