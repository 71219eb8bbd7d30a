"""benchmark_report.md: one page that says what to do, and the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flatout.benchmarks.comparisons import (
    headline_text,
    ladder_text,
    loader_text,
    peers_text,
    scaling_text,
)
from flatout.benchmarks.durations import time_to_train_text
from flatout.benchmarks.markdown import (
    bullets,
    cell_text,
    counted,
    number_text,
    table,
)


def report_text(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> str:
    """Markdown; sections that a mode does not fill are left out."""
    return _joined(
        _head(summary),
        findings_text(summary, trials, steps),
        _trials(trials),
        _profile(summary),
    )


def findings_text(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> str:
    """What came of it, in Markdown, without the table of trials."""
    return _joined(
        _reused(summary),
        _recommendation(summary),
        _verdict(summary),
        time_to_train_text(summary),
        _free(summary),
        ladder_text(steps) if summary["mode"] == "ladder" else "",
        loader_text(summary, trials),
        scaling_text(summary),
        headline_text(summary),
        peers_text(summary),
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _head(summary: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in summary["versions"].items())
    peak = summary["peak_tflops"]
    shown_peak = f", peak {peak:,.2f} TFLOP/s" if peak else ""
    state = "" if summary["complete"] else " **Cut short: run the same command again.**"
    return "\n".join(
        [
            f"# Benchmark: {summary['mode']}",
            "",
            f"{summary['date']}, {summary['device']}{shown_peak}; {versions}. "
            f"{summary['rows']:,} train rows, {summary['mean_tokens']:.0f} tokens on "
            f"average, at most {summary['longest_tokens']}; global batch "
            f"{summary['global_batch_size']}. {_counts(summary['trials'])} in "
            f"{summary['elapsed_s'] / 60:.1f} minutes.{state}",
        ]
    )


def _counts(trials: Mapping[str, int]) -> str:
    return ", ".join(f"{counted(n, 'trial')} {status}" for status, n in trials.items())


def _reused(summary: Mapping[str, Any]) -> str:
    reused, trials = summary["reused_trials"], sum(summary["trials"].values())
    if not reused:
        return ""
    return (
        f"{reused} of {counted(trials, 'trial')} measured by an earlier run of this "
        "sweep, which was cut short; its time is not counted."
    )


def _recommendation(summary: Mapping[str, Any]) -> str:
    picks = {name: row for name, row in summary["picks"].items() if row}
    if not picks:
        return _nothing(summary)
    head = (
        "pick",
        "trial",
        "batch",
        "strategy",
        "budget",
        "workers",
        "samples/s",
        "GiB",
    )
    lines = [
        (
            name.replace("_", " "),
            row["trial_id"],
            row["global_batch_size"],
            row["strategy"],
            row["token_budget"],
            row["num_workers"],
            number_text(row["samples_per_s"]),
            number_text(row["reserved_memory_gib"]),
        )
        for name, row in picks.items()
    ]
    memory = summary["memory"]
    note = f"\n\nMemory: {memory['note']}." if memory and memory["note"] else ""
    return (
        "## Recommended\n\n"
        + table(head, lines)
        + "\n\n"
        + (TRAIN_WITH_IT if "recommended" in picks else NONE_IS_SAFE)
        + note
    )


TRAIN_WITH_IT = (
    "Train with it: `kedro run --env=tuned`. The log says where the parameters were "
    "written; where that is not `conf/tuned`, copy them there first."
)
NONE_IS_SAFE = (
    "None is recommended, and nothing was written: with the longest rows, or with "
    "`benchmark.memory_headroom`, none of them is safe."
)


def _nothing(summary: Mapping[str, Any]) -> str:
    failed = summary["failed"]
    if not failed:
        return ""
    log = f" Its log: `{failed['log']}`" if failed["log"] else ""
    return (
        "## Nothing to recommend\n\n"
        f"Trial {failed['trial_id']} ({failed['label']}) ended as {failed['status']}: "
        f"{failed['note']}.{log}"
    )


def _verdict(summary: Mapping[str, Any]) -> str:
    verdict = summary["verdict"]
    if not verdict:
        return ""
    return (
        f"## Bound by: {verdict['bound']}\n\n"
        f"Trial {verdict['trial_id']}: {verdict['because']}. Next: {verdict['advice']}."
        f"\n\nGuide E's thresholds: {'; '.join(verdict['guide_e']) or 'none apply'}."
    )


def _free(summary: Mapping[str, Any]) -> str:
    free = summary["free_global_batch"]
    if not free:
        return ""
    head = "## Beyond the global batch\n\n"
    if not free["trial"]:
        return f"{head}No larger global batch gains: {free['note']}."
    train = free["parameters"]["train"]
    return (
        f"{head}Global batch {train['global_batch_size']} gives "
        f"{number_text(free['trial']['samples_per_s'])} samples/s with learning rate "
        f"{train['learning_rate']:.3g} ({free['learning_rate_rule']} rule). **This "
        "changes the optimisation**: compare the validation loss."
    )


TRIAL_COLUMNS = (
    ("trial", "trial_id"),
    ("label", "label"),
    ("kind", "kind"),
    ("devices", "world_size"),
    ("strategy", "strategy"),
    ("batch", "global_batch_size"),
    ("budget", "token_budget"),
    ("workers", "num_workers"),
    ("type", "precision"),
    ("I/O ms", "io_ms"),
    ("forward ms", "forward_ms"),
    ("backward ms", "backward_ms"),
    ("optimizer ms", "optimizer_ms"),
    ("total ms", "total_ms"),
    ("samples/s", "samples_per_s"),
    ("loader/s", "loader_samples_per_s"),
    ("GiB", "reserved_memory_gib"),
    ("status", "status"),
    ("note", "note"),
)


def _trials(trials: pd.DataFrame) -> str:
    if trials.empty:
        return ""
    columns = _telling_columns(trials)
    lines = [
        [cell_text(getattr(row, column)) for _, column in columns]
        for row in trials.itertuples()
    ]
    return "## Trials\n\n" + table([head for head, _ in columns], lines)


def _telling_columns(trials: pd.DataFrame) -> list[tuple[str, str]]:
    """Devices where they differ, and the loader's rate where there is one."""
    hidden = set()
    if trials["world_size"].nunique() == 1:
        hidden.add("world_size")
    if trials["loader_samples_per_s"].isna().all():
        hidden.add("loader_samples_per_s")
    return [entry for entry in TRIAL_COLUMNS if entry[1] not in hidden]


def _profile(summary: Mapping[str, Any]) -> str:
    profile = summary["profile"]
    if not profile:
        return ""
    files = [
        f"{name}: `{entry['file']}` ({entry['view']})"
        for name, entry in profile["files"].items()
    ]
    fault = f"It left no files: {profile['note']}."
    shown = bullets(files) or [f"{fault} `benchmark_trials.csv` names its log."]
    return "\n".join([f"## Profile of trial {profile['of']}", "", *shown])
