"""Sections of the report that set trainings side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from flatout.benchmarks.markdown import (
    bullets,
    number_text,
    percent_text,
    table,
    times_text,
)


def ladder_text(steps: pd.DataFrame) -> str:
    if steps.empty:
        return ""
    head = ("rung", "guide", "claimed", "samples/s", "± %", "alone", "in all", "kept")
    lines = [
        (
            row.name_ + (" (another optimisation)" if row.changes_optimisation else ""),
            row.source,
            row.claim,
            number_text(row.samples_per_s),
            number_text(row.spread_pct),
            times_text(row.individual),
            times_text(row.cumulative),
            "yes" if row.kept else "no",
        )
        for row in steps.rename(columns={"name": "name_"})
        .fillna({"source": "", "claim": ""})
        .itertuples()
    ]
    return "## Ladder\n\n" + table(head, lines)


def loader_text(summary: Mapping[str, Any]) -> str:
    if not summary["loader"]:
        return ""
    lines = [
        (entry["num_workers"], number_text(entry["samples_per_s"]))
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
    return "\n".join([text, "", f"A batch: {shown}. {limit}.", *bullets(slow)])


def scaling_text(summary: Mapping[str, Any]) -> str:
    if not summary["scaling"]:
        return ""
    lines = [
        (
            entry["devices"],
            number_text(entry["samples_per_s"]),
            number_text(100 * entry["share_of_linear"])
            if entry["share_of_linear"]
            else entry["status"],
        )
        for entry in summary["scaling"]
    ]
    return "## Scaling\n\n" + table(("devices", "samples/s", "% of linear"), lines)


def headline_text(summary: Mapping[str, Any]) -> str:
    if not summary["headline"]:
        return ""
    head = ("training", "samples/s", "over slow", "over the Trainer's best", "windows")
    more = ("TFLOP/s", "of peak", "GiB", "first step s", "status")
    lines = [
        (
            entry["name"],
            number_text(entry["samples_per_s"]),
            times_text(entry["over_slow"]),
            times_text(entry["over_trainer"]),
            percent_text(entry["spread_pct"]),
            number_text(entry["tflops_per_s"]),
            percent_text(entry["share_of_measured_peak"], 100),
            number_text(entry["reserved_memory_gib"]),
            number_text(entry["first_step_s"]),
            entry["status"],
        )
        for entry in summary["headline"]
    ]
    note = (
        "Samples/s: the median of windows behind the warm-up; `windows`: how far they "
        "differ. flatout's go over the same rows, the fastest `repeats` of at most "
        "twice as many and one count; the Trainer's are three stretches over which it "
        "sorts. `of peak`: of what a large product reached on this device."
    )
    shown = table((*head, *more), lines)
    return "\n".join(["## Headline", "", shown, "", note, *_flags(summary["headline"])])


def _flags(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    found = [
        f"{entry['name']}: `{entry['flags']}`" for entry in entries if entry["flags"]
    ]
    return bullets(found)


def peers_text(summary: Mapping[str, Any]) -> str:
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
            number_text(entry["samples_per_s"]),
            number_text(entry["reserved_memory_gib"]),
            number_text(entry["seconds_to_target"]),
            number_text(entry["first_step_s"]),
            number_text(entry["validation_loss"], 4),
            number_text(entry["validation_accuracy"], 3),
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
            f"Target: validation loss {number_text(target, 4)}, the lowest that all "
            "reached. Same model, rows, seed, metric code and warm-up rule.",
            *_flags(summary["peers"]),
        ]
    )
