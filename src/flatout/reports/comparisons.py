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

BY_TURNS = (
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
    return section("Ladder", table(rows, columns), BY_TURNS)


def _rung_name(row: Row) -> str:
    other = " (another optimisation)" if row["changes_optimisation"] else ""
    return f"{row['name']}{other}"


def _end(row: Row) -> str:
    if row["status"] == "ok":
        return f"ok, {ALONE}" if ALONE in row["note"] else "ok"
    return cell_text(f"{row['status']}: {row['note']}")


def loader_text(summary: Summary, trials: pd.DataFrame) -> str:
    """Compare the loader's speed with the steps."""
    if not summary["loader"]:
        return ""
    needed = _steps_rate(trials, summary["global_batch_size"])
    rows = [
        {**entry, "times": ratio(entry["samples_per_s"], needed)}
        for entry in summary["loader"]
    ]
    columns = {"workers": "num_workers", "samples/s": "samples_per_s"}
    return section(
        "Loader",
        table(rows, {**columns, "of the steps' rate": times("times")}),
        _fast_enough(rows, needed),
    )


def _steps_rate(trials: pd.DataFrame, global_batch_size: int) -> float | None:
    """Return the highest rate of steps per device: the required loader rate."""
    if trials.empty:
        return None
    alone = trials[(trials["kind"] == "compute") & (trials["status"] == "ok")]
    alone = alone[alone["global_batch_size"] == global_batch_size]
    rate = (alone["samples_per_s"] / alone["world_size"]).max()
    return None if pd.isna(rate) else float(rate)


def _fast_enough(rows: Sequence[Row], needed: float | None) -> str:
    """Describe the result by the rule with which mode tune chooses workers."""
    known = {row["num_workers"]: row["times"] for row in rows if row["times"]}
    if not known:
        return "The rate of steps without the loader was not measured."
    for workers, value in sorted(known.items()):
        if value >= (LOADER_MARGIN if workers else FREE_LOADER):
            return f"**Fast enough**: {_gives(workers, value, needed)}."
    most = max(known, key=lambda workers: known[workers])
    return (
        f"**Not fast enough**: at best {_gives(most, known[most], needed)}. Steps "
        f"do not wait for a loader of {LOADER_MARGIN:g} times their rate, or of "
        f"{FREE_LOADER:g} times without workers."
    )


def _gives(workers: int, value: float, needed: float | None) -> str:
    name = "1 worker" if workers == 1 else f"{workers} workers"
    return (
        f"with {name} the loader reaches {value:.1f} times the {number_text(needed)} "
        "samples/s that steps need on one device"
    )


def scaling_text(summary: Summary) -> str:
    rows = summary["scaling"]
    if not rows:
        return ""
    columns: Columns = {
        "devices": "devices",
        "samples/s": "samples_per_s",
        "% of linear": lambda row: (
            number_text(100 * row["share_of_linear"])
            if row["share_of_linear"]
            else row["status"]
        ),
    }
    # Mode scaling starts more processes than devices on machines without GPUs.
    shared = max(row["devices"] for row in rows) > summary["devices"]
    return section("Scaling", table(rows, columns), SHARED_CORES if shared else "")


SHARED_CORES = (
    "There is no GPU here: these devices are processes that share the same cores, so "
    "the figures do not apply to machines with one device per process."
)


def time_to_train_text(summary: Mapping[str, Any]) -> str:
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
    if not rows:
        return ""
    return section("Trials", table(rows, told_columns(TRIALS, rows)))


def told_columns(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns with information on these rows."""
    values = {head: {row[name] for row in rows} for head, name in columns.items()}
    return {
        head: name
        for head, name in columns.items()
        if values[head] != {None}
        and (head not in IF_THEY_DIFFER or len(values[head]) > 1)
    }
