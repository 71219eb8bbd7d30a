"""Create the page benchmark_report.md: a recommendation and its measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flatout.engine.benchmark.runner import ALONE
from flatout.reports.markdown import (
    Columns,
    Row,
    cell_text,
    counted,
    section,
    table,
    time_text,
    times,
)

Summary = Mapping[str, Any]

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
    "optimizer ms": "optimizer_ms",
    "total ms": "total_ms",
    "samples/s": "samples_per_s",
    "loader/s": "loader_samples_per_s",
    "GPU %": "gpu_util_pct",
    "memory GiB": "reserved_memory_gib",
    "status": "status",
    "note": "note",
}
"""Maps headings to the columns of a trial. A heading ends with the unit, if there is
one."""
SETTINGS = ("batch", "strategy", "budget", "workers", "type")
MEASURED = ("samples/s", "GPU %", "memory GiB")
PICKS = {
    **{"pick": "pick", "trial": "trial_id"},
    **{head: TRIALS[head] for head in (*SETTINGS, *MEASURED)},
    "% of its memory": "memory_pct",
    "samples/s per GiB": "samples_per_s_per_gib",
}
"""Maps the headings of the table of recommended trials to its columns."""


def report_text(summary: Summary, trials: pd.DataFrame, steps: pd.DataFrame) -> str:
    """Return the page as Markdown. `steps` is the table of ladder rungs. Sections that
    do not apply to the mode of the benchmark are left out."""
    rows = trials.astype(object).where(trials.notna(), None).to_dict("records")
    return _joined(
        f"# Benchmark: {summary['mode']}\n\n**{summary['answer']}**",
        _head(summary),
        _recommendation(summary),
        _verdict(summary),
        ladder_text(steps) if summary["mode"] == "ladder" else "",
        trials_text(rows),
        _profile(summary),
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _head(summary: Summary) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in summary["versions"].items())
    peak = summary["peak_tflops"]
    shown_peak = f", peak by data sheet {peak:,.2f} TFLOP/s" if peak else ""
    trials = summary["trials"].items()
    counts = ", ".join(f"{counted(n, 'trial')} {status}" for status, n in trials)
    return (
        f"{summary['date']}, {summary['device']}{shown_peak}; {versions}. "
        f"{summary['rows']:,} train rows, {summary['mean_tokens']:.0f} tokens on "
        f"average, at most {summary['longest_tokens']}; global batch "
        f"{summary['global_batch_size']}. {counts} in "
        f"{summary['elapsed_s'] / 60:.1f} minutes."
    )


def _recommendation(summary: Summary) -> str:
    picks = {name: row for name, row in summary["picks"].items() if row}
    if picks:
        rows = [_pick(name, row, summary["memory_gib"]) for name, row in picks.items()]
        chosen = table(rows, with_values(PICKS, rows))
        return section("Recommended", chosen, _hours(summary))
    failed = summary["failed"]
    return section("No recommendation", failure_text(failed)) if failed else ""


def _hours(summary: Summary) -> str:
    if not (found := summary["time_to_train"]):
        return ""
    before, after = time_text(found["hours_before"]), time_text(found["hours_after"])
    instead = f" instead of {before}" if before and before != after else ""
    return f"The steps of {counted(found['epochs'], 'epoch')} need {after}{instead}."


def _pick(name: str, row: Row, memory_gib: float | None) -> Row:
    """Return a recommended trial's row with additional columns. `name` is the kind of
    recommendation, and `memory_gib` is the memory of the device."""
    used, rate = row["reserved_memory_gib"], row["samples_per_s"]
    return {
        **row,
        "pick": name.replace("_", " "),
        "samples_per_s_per_gib": rate / used if rate and used else None,
        "memory_pct": 100 * used / memory_gib if used and memory_gib else None,
    }


def failure_text(trial: Mapping[str, Any]) -> str:
    """Describe why a trial failed. `trial` is its row in the table of trials."""
    log = f" Its log: `{trial['log']}`" if isinstance(trial["log"], str) else ""
    return (
        f"Trial {trial['trial_id']} ({trial['label']}) ended as {trial['status']}: "
        f"{trial['note'].rstrip('.')}.{log if trial['log'] else ''}"
    )


def _verdict(summary: Summary) -> str:
    if not (verdict := summary["verdict"]):
        return ""
    text = f"Trial {verdict['trial_id']}: {verdict['because']}. Next: "
    return section(f"Bound by: {verdict['bound']}", f"{text}{verdict['advice']}.")


def _profile(summary: Summary) -> str:
    if not (profile := summary["profile"]):
        return ""
    files = "\n".join(
        f"- {name}: `{entry['file']}` ({entry['view']})"
        for name, entry in profile["files"].items()
    )
    fault = f"It left no files: {profile['note']}."
    shown = files or f"{fault} `benchmark_trials.csv` names its log."
    return section(f"Profile of trial {profile['of']}", shown)


ALTERNATING = (
    "Alternating: the median ratio between windows with this rung and windows with "
    "the kept rungs below it (for the last lines: with conf/slow). IQR %: the "
    "interquartile range of these ratios, in percent of the median. Total: the "
    "product. Leave-one-out: the median ratio between windows with all kept "
    "optimisations, at the configured global batch, and windows with all except this "
    "one."
)


def ladder_text(steps: pd.DataFrame) -> str:
    """Return the table of rungs, each with its gain or the reason why it failed."""
    if steps.empty:
        return ""
    rows = steps.fillna({"note": "", "leave_one_out_note": ""}).to_dict("records")
    columns: Columns = {
        "rung": lambda row: (
            f"{row['name']}{' (another optimisation)' * row['changes_optimisation']}"
        ),
        "samples/s": "samples_per_s",
        "alternating": times("individual"),
        "IQR %": "spread_pct",
        "total": times("cumulative"),
        "kept": lambda row: "yes" if row["kept"] and row["status"] == "ok" else "no",
        "leave-one-out": _leave_one_out,
    }
    if any(_end(row) != "ok" for row in rows):
        columns = {**columns, "status": _end}
    return section("Ladder", table(rows, columns), ALTERNATING)


def _leave_one_out(row: Row) -> str:
    spread = cell_text(row["leave_one_out_spread_pct"])
    gain = times("leave_one_out")(row) + (f" (IQR {spread} %)" if spread else "")
    return ", ".join(filter(None, (gain, cell_text(row["leave_one_out_note"]))))


def _end(row: Row) -> str:
    if row["status"] == "ok":
        return f"ok, {ALONE}" if ALONE in row["note"] else "ok"
    return cell_text(f"{row['status']}: {row['note']}")


def trials_text(rows: Sequence[Row]) -> str:
    """Return the table of trials, without columns that contain no information."""
    return section("Trials", table(rows, with_values(TRIALS, rows))) if rows else ""


def with_values(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns that have a value in at least one row."""
    found = columns.items()
    return {h: n for h, n in found if any(row[n] is not None for row in rows)}
