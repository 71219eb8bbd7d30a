"""benchmark_report.md: one page with a recommendation and the figures for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import yaml

from flatout.reports.comparisons import (
    ladder_text,
    loader_text,
    scaling_text,
    time_to_train_text,
    told_columns,
    trials_text,
)
from flatout.reports.markdown import (
    Row,
    bullets,
    counted,
    number_text,
    section,
    table,
)

PICKS = {
    "pick": "pick",
    "trial": "trial_id",
    "batch": "global_batch_size",
    "strategy": "strategy",
    "budget": "token_budget",
    "workers": "num_workers",
    "type": "precision",
    "samples/s": "samples_per_s",
    "GPU %": "gpu_util_pct",
    "GiB": "reserved_memory_gib",
    "% of its memory": "memory_pct",
    "samples/s per GiB": "samples_per_s_per_gib",
}
"""Columns of the recommended trials, by heading."""


def report_text(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> str:
    """Return Markdown; sections that a mode does not fill are left out."""
    return _joined(
        f"# Benchmark: {summary['mode']}\n\n**{summary['answer']}**",
        _head(summary),
        findings_text(summary, trials, steps),
        trials_text(_records(trials)),
        _profile(summary),
    )


def findings_text(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> str:
    """Return the findings in Markdown, without the table of trials."""
    return _joined(
        _reused(summary),
        _skipped(summary),
        _recommendation(summary),
        _verdict(summary),
        time_to_train_text(summary),
        _free(summary),
        ladder_text(steps) if summary["mode"] == "ladder" else "",
        loader_text(summary, trials),
        scaling_text(summary),
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _head(summary: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in summary["versions"].items())
    peaks = {
        "peak by data sheet": summary["peak_tflops"],
        "peak measured": summary.get("peak_tflops_measured"),
    }
    shown_peak = "".join(
        f", {name} {peak:,.2f} TFLOP/s" for name, peak in peaks.items() if peak
    )
    state = "" if summary["complete"] else " **Cut short: run the same command again.**"
    return "\n".join(
        [
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


def _skipped(summary: Mapping[str, Any]) -> str:
    skipped = summary["skipped"]
    if not skipped:
        return ""
    return (
        f"{counted(len(skipped), 'combination')} with a larger global batch not tried: "
        "a smaller one ran out of memory."
    )


def _recommendation(summary: Mapping[str, Any]) -> str:
    picks = {name: row for name, row in summary["picks"].items() if row}
    if not picks:
        return _nothing(summary)
    gib = summary["memory_gib"]
    rows = [_pick_row(name, row, gib) for name, row in picks.items()]
    chosen = table(rows, told_columns(PICKS, rows))
    return section("Recommended", chosen, _advice(summary), _to_paste(summary))


def _to_paste(summary: Mapping[str, Any]) -> str:
    """Return settings of a grid, for another parameters.yml than that of conf/tuned."""
    tuned = summary["tuned"]
    if summary["mode"] != "grid" or not tuned or not tuned["gained"]:
        return ""
    return f"```yaml\n{yaml.safe_dump(tuned['parameters'], sort_keys=False)}```"


def _pick_row(name: str, row: Row, memory_gib: float | None) -> Row:
    """`memory_gib`: memory of the device, or the machine's."""
    used, rate = row["reserved_memory_gib"], row["samples_per_s"]
    return {
        **row,
        "pick": name.replace("_", " "),
        "samples_per_s_per_gib": rate / used if rate and used else None,
        "memory_pct": 100 * used / memory_gib if used and memory_gib else None,
    }


def _advice(summary: Mapping[str, Any]) -> str:
    if not summary["picks"]["recommended"]:
        return NONE_IS_SAFE
    return TRAIN_WITH_IT if summary["tuned"]["gained"] else NOTHING_GAINED


TRAIN_WITH_IT = (
    "Train with it: `kedro run --env=tuned`, with the same `--params` as this command."
)
NOTHING_GAINED = (
    "Nothing was gained: no settings are faster than the configured ones by more than "
    "noise. `kedro run` trains with those; `conf/tuned` has the line above."
)
NONE_IS_SAFE = (
    "None is recommended, and nothing was written: none of them leaves "
    "`benchmark.memory_headroom` free."
)


def _nothing(summary: Mapping[str, Any]) -> str:
    failed = summary["failed"]
    if not failed:
        return ""
    return section("Nothing to recommend", failure_text(failed))


def failure_text(trial: Mapping[str, Any]) -> str:
    """Describe the failure of a trial, given as a row of the table or of its file."""
    log = trial["log"] if isinstance(trial["log"], str) else ""
    ended = (
        f"Trial {trial['trial_id']} ({trial['label']}) ended as {trial['status']}: "
        f"{trial['note'].rstrip('.')}."
    )
    return f"{ended} Its log: `{log}`" if log else ended


def _verdict(summary: Mapping[str, Any]) -> str:
    verdict = summary["verdict"]
    if not verdict:
        return ""
    return section(
        f"Bound by: {verdict['bound']}",
        f"Trial {verdict['trial_id']}: {verdict['because']}. Next: "
        f"{verdict['advice']}.",
    )


def _free(summary: Mapping[str, Any]) -> str:
    free = summary["free_global_batch"]
    if not free:
        return ""
    if not free["trial"]:
        text = f"No larger global batch gains: {free['note']}."
        return section("Beyond the global batch", text)
    train = free["parameters"]["train"]
    return section(
        "Beyond the global batch",
        f"Global batch {train['global_batch_size']} gives "
        f"{number_text(free['trial']['samples_per_s'])} samples/s with learning rate "
        f"{train['learning_rate']:.3g} ({free['learning_rate_rule']} rule). **This "
        "changes the optimisation**: compare the validation loss.",
    )


def _records(trials: pd.DataFrame) -> list[dict[str, Any]]:
    return trials.astype(object).where(trials.notna(), None).to_dict("records")


def _profile(summary: Mapping[str, Any]) -> str:
    profile = summary["profile"]
    if not profile:
        return ""
    files = bullets(
        f"{name}: `{entry['file']}` ({entry['view']})"
        for name, entry in profile["files"].items()
    )
    fault = f"It left no files: {profile['note']}."
    shown = files or f"{fault} `benchmark_trials.csv` names its log."
    return section(f"Profile of trial {profile['of']}", shown)
