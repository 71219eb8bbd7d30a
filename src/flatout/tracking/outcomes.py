"""Convert the results of a run to MLflow's metrics, tags and nested runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.trials.trial_spec import SETTING_BY_COLUMN
from flatout.engine.parameters import reported
from flatout.tracking.facts import plain_name
from flatout.tracking.record import RunRecord

FIGURES = (
    "samples_per_s",
    "tokens_per_s",
    "padding_pct",
    "mfu_pct",
    "share_of_measured_peak_pct",
    "loader_wait_pct",
    "cpu_wait_pct",
    "gpu_clock_mhz",
    "step_ms_p50",
    "peak_reserved_gib",
    "compile_s",
    "train_wall_s",
)
"""Metrics that are stored as tags, because a chart of them would have one point."""

CURVES = "validation_"
"""Prefix of metrics that have one point per evaluation."""
SORTED_BY = "test_accuracy"

TRIAL_SETTINGS = frozenset({*SETTING_BY_COLUMN, "world_size"})
"""Numeric columns with settings of a trial, as opposed to measurements."""

PRUNED = "pruned"
"""Status of a trial that a sweep ended early on purpose. It is not a failure."""

DESCRIPTION = "mlflow.note.content"

DETECTED = ("precision", "recall", "f1", "false_alarms", "abnormal_found")
BEST = ("validation_loss", "validation_accuracy", "samples_per_s")
REPORT_TAGS = (
    *("device", "world_size", *reported(), "compile_reason", "token_key"),
    *("resumed_from_step", "exit_reason"),
)


def record_node_outputs(record: RunRecord, outputs: dict[str, Any]) -> None:
    """Add the metrics, tags and trials in a node's `outputs` to the record. `outputs`
    is keyed by catalog entry."""
    if report := outputs.get("train_report"):
        chosen_by = record.params.get("train.metric", "")
        record.metrics |= report_metrics(report, f"test_{chosen_by}")
        record.figures |= report_figures(report)
        record.tags |= report_tags(report)
    if report := outputs.get("detection_report"):
        record.metrics |= _numbers((f"detection_{n}", report[n]) for n in DETECTED)
    if "benchmark_trials" in outputs:
        summary = outputs["benchmark_summary"]
        record.trials = nested_runs(outputs["benchmark_trials"])
        record.metrics |= _numbers(
            (f"{name}_samples_per_s", trial["samples_per_s"])
            for name, trial in summary["picks"].items()
            if trial
        )
        if len(steps := outputs["benchmark_ladder"]):
            gains = steps.set_index("name")["leave_one_out"].dropna().items()
            record.metrics |= _numbers(
                (f"leave_one_out_{plain_name(name)}", gain) for name, gain in gains
            )
        if verdict := summary["verdict"]:
            record.tags["bound_by"] = verdict["bound"]
        record.tags[DESCRIPTION] = summary.get("answer", "")
    for name in outputs.keys() & {"sweep_trials", "crossvalidation_trials"}:
        record.trials = nested_runs(outputs[name])
    if best := outputs.get("sweep_best"):
        names = {*BEST, best["chosen_by"]}
        record.metrics |= _numbers((f"best_{n}", best[n]) for n in names)
        record.tags[DESCRIPTION] = _sweep_answer(best)


def _numbers(found: Iterable[tuple[str, Any]]) -> dict[str, float]:
    return {name: float(value) for name, value in found if value is not None}


def nested_runs(trials: Any) -> list[dict[str, Any]]:
    """Return one nested run per row of the DataFrame `trials`, as a dict with name,
    status, params, metrics, tags, start_ms, end_ms and points. Measured numbers become
    metrics. Settings and strings become parameters.

    Each run lasts as long as its trial. If the table has no start times, the runs
    follow one another, and the last one ends at the current time.
    """
    rows = trials.to_dict("records")
    elapsed_s = [float(row.get("elapsed_s") or 0.0) for row in rows]
    # Empty cells of a table are NaN.
    durations_ms = [int(1000 * s) if math.isfinite(s) else 0 for s in elapsed_s]
    start_ms = int(time.time() * 1000) - sum(durations_ms)
    found = []
    for row, duration_ms in zip(rows, durations_ms, strict=True):
        begun_s = row.get("begun_s")  # only in a sweep, whose trials run in parallel
        if begun_s is not None and math.isfinite(begun_s):
            start_ms = int(1000 * begun_s)
        end_ms = start_ms + duration_ms
        times = {"start_ms": start_ms, "end_ms": end_ms}
        found.append({**_nested_run(row), **times, "points": _points(row)})
        start_ms = end_ms
    return found


def _points(row: dict[str, Any]) -> str | None:
    """Return the file with a trial's learning curves, or None if it does not exist."""
    log = row.get("log")  # "" or NaN if the trial has never begun
    is_known = isinstance(log, str) and log
    file = Path(log).with_name("metrics.jsonl") if is_known else None
    return str(file) if file and file.is_file() else None


def _nested_run(row: dict[str, Any]) -> dict[str, Any]:
    present = {k: v for k, v in row.items() if v is not None and v == v}  # noqa: PLR0124
    present.pop("begun_s", None)
    numbers = {
        k: float(v)
        for k, v in present.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool)
        if k not in TRIAL_SETTINGS and not _is_swept(k)
    }
    texts = {k: str(v)[:500] for k, v in present.items() if k not in numbers}
    status = row.get("status")
    ended_well = status in (None, "ok", PRUNED)
    return {
        "name": plain_name(_trial_name(row)),
        "status": "FINISHED" if ended_well else "FAILED",
        "params": texts,
        "metrics": numbers,
        "tags": {"exit_reason": PRUNED} if status == PRUNED else {},
    }


def _trial_name(row: dict[str, Any]) -> str:
    """Return a run name such as `003_compute` or `003_learning_rate-0.001`. It consists
    of the trial's number, its label or kind, and its swept values."""
    parts = [row.get("trial_id"), row.get("label") or row.get("kind")]
    swept = {name: value for name, value in row.items() if _is_swept(name)}
    parts += [f"{name.rsplit('.')[-1]}-{value}" for name, value in swept.items()]
    return "_".join(str(part) for part in parts if part)


def _is_swept(column: str) -> bool:
    """Return whether the column is a swept setting, whose name is a path with dots."""
    return "." in column


def _sweep_answer(best: dict[str, Any]) -> str:
    """Return a sentence that describes the best trial."""
    chosen = ", ".join(f"{name} = {value}" for name, value in best["settings"].items())
    name = best["chosen_by"]
    what = "won" if best["is_winner"] else "has the best mean, no winner"
    return f"Trial {best['trial_id']} {what}: {name} {best[name]:.6g} with {chosen}."


def report_tags(report: dict[str, Any]) -> dict[str, str]:
    """Return tags for the versions and the resolved settings in a train report."""
    tags = {key: str(report[key]) for key in REPORT_TAGS if report.get(key) is not None}
    versions = report.get("versions", {})
    return tags | {f"version.{name}": text for name, text in versions.items() if text}


def report_metrics(report: dict[str, Any], chosen_by: str = "") -> dict[str, float]:
    """Return the values in a train report that become metrics of the run: the best
    model's validation metrics, the test accuracy, and the metric `chosen_by`."""
    names = (n for n in report if n.startswith(CURVES) or n in (SORTED_BY, chosen_by))
    return _numbers((name, report[name]) for name in names)


def report_figures(report: dict[str, Any]) -> dict[str, float]:
    """Return the throughput and all validation and test metrics in a train report."""
    judged = [name for name in report if name.startswith((CURVES, "test_"))]
    return _numbers((name, report.get(name)) for name in (*FIGURES, *judged))


def figure_tags(figures: dict[str, float]) -> dict[str, str]:
    """Return the metrics by which runs are compared, formatted as tags."""
    compared = [n for n in figures if n in FIGURES or n.startswith("guard_")]
    return {name: f"{figures[name]:.6g}" for name in compared}


def description(text: str, record: RunRecord) -> str:
    """Return the run's description as Markdown: `text` and a table of final metrics."""
    figures = sorted({**record.metrics, **record.figures}.items())
    if not figures:
        return text
    table = ["| figure | |", "|---|---|"]
    table += [f"| {name} | {shown(value)} |" for name, value in figures]
    return "\n".join([text, "", *table] if text else table)


def shown(value: float) -> str:
    """Format a value with four significant digits, or as an integer if it is large."""
    is_plain = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if is_plain else f"{value:.4g}"
