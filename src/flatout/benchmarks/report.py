"""benchmark_report.md: one page that says what to do, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

Line = Sequence[Any]


def report_text(
    summary: Mapping[str, Any], trials: pd.DataFrame, steps: pd.DataFrame
) -> str:
    """Markdown; sections that a mode does not fill are left out."""
    return _joined(
        _head(summary),
        findings_text(summary, steps),
        _trials(trials),
        _profile(summary),
    )


def findings_text(summary: Mapping[str, Any], steps: pd.DataFrame) -> str:
    """What came of it, in Markdown, without the table of trials."""
    return _joined(
        _recommendation(summary),
        _verdict(summary),
        _times(summary),
        _free(summary),
        _ladder(steps) if summary["mode"] == "ladder" else "",
        _loader(summary),
        _scaling(summary),
        _headline(summary),
        _peers(summary),
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
    return ", ".join(f"{count} trials {status}" for status, count in trials.items())


def _recommendation(summary: Mapping[str, Any]) -> str:
    picks = {name: row for name, row in summary["picks"].items() if row}
    if not picks:
        return _nothing(summary)
    head = ("pick", "trial", "strategy", "budget", "workers", "samples/s", "GiB")
    lines = [
        (
            name.replace("_", " "),
            row["trial_id"],
            row["strategy"],
            row["token_budget"],
            row["num_workers"],
            _number(row["samples_per_s"]),
            _number(row["reserved_memory_gib"]),
        )
        for name, row in picks.items()
    ]
    memory = summary["memory"]
    note = f"\n\nMemory: {memory['note']}." if memory and memory["note"] else ""
    return (
        "## Recommended\n\n"
        + table(head, lines)
        + "\n\nTrain with it: `kedro run --env=tuned`"
        + note
    )


def _nothing(summary: Mapping[str, Any]) -> str:
    failed = summary["failed"]
    if not failed:
        return ""
    return (
        "## Nothing to recommend\n\n"
        f"Trial {failed['trial_id']} ({failed['label']}) ended as {failed['status']}: "
        f"{failed['note']}. Its log: `{failed['log']}`"
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


def _times(summary: Mapping[str, Any]) -> str:
    times = summary["time_to_train"]
    if not times:
        return ""
    epochs, deadline = times[0]["epochs"], times[0]["deadline_hours"]
    lines = [
        (
            f"{entry['rows']:,}",
            _number(entry["hours_before"]),
            _number(entry["hours_after"]),
            "yes" if entry["in_time"] else "no",
        )
        for entry in times
    ]
    return (
        f"## Time to train {epochs:g} epochs\n\n"
        + table(
            ("rows", "hours before", "hours after", f"within {deadline:g} h"), lines
        )
        + "\n\nSteps alone; evaluation, checkpoints and start-up come on top."
    )


def _free(summary: Mapping[str, Any]) -> str:
    free = summary["free_global_batch"]
    if not free:
        return ""
    train = free["parameters"]["train"]
    return (
        "## Beyond the global batch\n\n"
        f"Global batch {train['global_batch_size']} gives "
        f"{_number(free['trial']['samples_per_s'])} samples/s with learning rate "
        f"{train['learning_rate']:.3g} ({free['learning_rate_rule']} rule). **This "
        "changes the optimisation**: compare the validation loss."
    )


def _ladder(steps: pd.DataFrame) -> str:
    if steps.empty:
        return ""
    head = ("rung", "guide", "claimed", "samples/s", "alone", "in all", "kept")
    lines = [
        (
            row.name_ + (" (another optimisation)" if row.changes_optimisation else ""),
            row.source,
            row.claim,
            _number(row.samples_per_s),
            _times_text(row.individual),
            _times_text(row.cumulative),
            "yes" if row.kept else "no",
        )
        for row in steps.rename(columns={"name": "name_"})
        .fillna({"source": "", "claim": ""})
        .itertuples()
    ]
    return "## Ladder\n\n" + table(head, lines)


def _loader(summary: Mapping[str, Any]) -> str:
    if not summary["loader"]:
        return ""
    lines = [
        (entry["num_workers"], _number(entry["samples_per_s"]))
        for entry in summary["loader"]
    ]
    text = "## Loader alone\n\n" + table(("workers", "samples/s"), lines)
    stages = summary["loader"][0]["stages"]
    if not stages:
        return text
    shown = ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {stages[name]:.2f} ms"
        for name in ("batch_ms", "choose_rows_ms", "plan_ms", "collate_ms")
    )
    slow = [
        f"step {entry['step']}: {entry['ms']:.1f} ms, {entry['tokens']} tokens, "
        f"longest rows {entry['longest_rows']}"
        for entry in stages["slow"]
    ]
    limit = f"{stages['slow_count']} batches took more than {stages['slow_ms']:g} ms"
    return "\n".join([text, "", f"A batch: {shown}. {limit}.", *_bullets(slow)])


def _scaling(summary: Mapping[str, Any]) -> str:
    if not summary["scaling"]:
        return ""
    lines = [
        (
            entry["devices"],
            _number(entry["samples_per_s"]),
            _number(100 * entry["share_of_linear"])
            if entry["share_of_linear"]
            else entry["status"],
        )
        for entry in summary["scaling"]
    ]
    return "## Scaling\n\n" + table(("devices", "samples/s", "% of linear"), lines)


def _headline(summary: Mapping[str, Any]) -> str:
    if not summary["headline"]:
        return ""
    head = ("training", "samples/s", "over slow", "over the Trainer's best", "windows")
    more = ("TFLOP/s", "of peak", "GiB", "first step s", "status")
    lines = [
        (
            entry["name"],
            _number(entry["samples_per_s"]),
            _times_text(entry["over_slow"]),
            _times_text(entry["over_trainer"]),
            _percent(entry["spread_pct"]),
            _number(entry["tflops_per_s"]),
            _percent(entry["share_of_measured_peak"], 100),
            _number(entry["reserved_memory_gib"]),
            _number(entry["first_step_s"]),
            entry["status"],
        )
        for entry in summary["headline"]
    ]
    note = (
        "Samples/s: the median window behind the warm-up; `windows`: how far they "
        "differ; `of peak`: of what a large product reached on this device."
    )
    shown = table((*head, *more), lines)
    return "\n".join(["## Headline", "", shown, "", note, *_flags(summary["headline"])])


def _flags(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    found = [
        f"{entry['name']}: `{entry['flags']}`" for entry in entries if entry["flags"]
    ]
    return _bullets(found)


def _peers(summary: Mapping[str, Any]) -> str:
    if not summary["peers"]:
        return ""
    head = (
        "contender",
        "samples/s",
        "GiB",
        "s to target",
        "of these the first step",
        "loss",
        "accuracy",
        "status",
    )
    lines = [
        (
            entry["name"],
            _number(entry["samples_per_s"]),
            _number(entry["reserved_memory_gib"]),
            _number(entry["seconds_to_target"]),
            _number(entry["first_step_s"]),
            _number(entry["validation_loss"], 4),
            _number(entry["validation_accuracy"], 3),
            entry["status"],
        )
        for entry in summary["peers"]
    ]
    target = summary["peers"][0]["target_validation_loss"]
    return "\n".join(
        [
            "## Peers",
            "",
            table(head, lines),
            "",
            f"Target: validation loss {_number(target, 4)}, the lowest that all "
            "reached. Same model, rows, seed, metric code and warm-up rule.",
            *_flags(summary["peers"]),
        ]
    )


TRIAL_COLUMNS = (
    ("trial", "trial_id"),
    ("kind", "kind"),
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
    ("GiB", "reserved_memory_gib"),
    ("status", "status"),
    ("note", "note"),
)


def _trials(trials: pd.DataFrame) -> str:
    if trials.empty:
        return ""
    lines = [
        [_cell(getattr(row, column)) for _, column in TRIAL_COLUMNS]
        for row in trials.itertuples()
    ]
    heads = [head for head, _ in TRIAL_COLUMNS]
    return "## Trials\n\n" + table(heads, lines)


def _profile(summary: Mapping[str, Any]) -> str:
    profile = summary["profile"]
    if not profile:
        return ""
    files = [
        f"{name}: `{entry['file']}` ({entry['view']})"
        for name, entry in profile["files"].items()
    ]
    return "\n".join([f"## Profile of trial {profile['of']}", "", *_bullets(files)])


def table(head: Line, lines: Iterable[Line]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell) for cell in row) + " |" for row in rows
    )


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _times_text(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}x"


def _percent(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None or pd.isna(value) else f"{scale * value:.1f} %"


def _cell(value: Any) -> str:
    if value is None or isinstance(value, float):
        return _number(value)
    return str(value).replace("|", "/")


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None or pd.isna(value):
        return ""
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
