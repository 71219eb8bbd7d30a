"""Sections of the report that set trainings side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from flatout.benchmarks.markdown import (
    bullets,
    cell_text,
    number_text,
    percent_text,
    table,
    times_text,
)
from flatout.engine.bench.ladder import ALONE
from flatout.engine.bench.tune import FREE_LOADER, LOADER_MARGIN

BY_TURNS = (
    "By turns: the median ratio of windows beside those of what was kept below (of the "
    "last lines, of conf/slow); the middle half of the ratios lies ± % apart. In all: "
    "the product."
)


def ladder_text(steps: pd.DataFrame) -> str:
    """What each rung brought; how it ended, where one did not end well."""
    if steps.empty:
        return ""
    head = (
        "rung",
        "guide",
        "claimed",
        "samples/s",
        "by turns",
        "± %",
        "in all",
        "kept",
    )
    rows = list(
        steps.rename(columns={"name": "name_"})
        .fillna({"source": "", "claim": "", "note": ""})
        .itertuples()
    )
    lines = [_rung_cells(row) for row in rows]
    if any(_end(row) != "ok" for row in rows):
        head = (*head, "status")
        lines = [[*line, _end(row)] for line, row in zip(lines, rows, strict=True)]
    return "## Ladder\n\n" + table(head, lines) + f"\n\n{BY_TURNS}"


def _rung_cells(row: Any) -> list[str]:
    return [
        row.name_ + (" (another optimisation)" if row.changes_optimisation else ""),
        row.source,
        row.claim,
        number_text(row.samples_per_s),
        times_text(row.individual),
        number_text(row.spread_pct),
        times_text(row.cumulative),
        "yes" if row.kept and row.status == "ok" else "no",
    ]


def _end(row: Any) -> str:
    if row.status == "ok":
        return f"ok, {ALONE}" if ALONE in row.note else "ok"
    return cell_text(f"{row.status}: {row.note}")


def loader_text(summary: Mapping[str, Any], trials: pd.DataFrame) -> str:
    """Whether the loader is fast enough for the steps, and the stages of a batch."""
    entries = summary["loader"]
    if not entries:
        return ""
    needed = _steps_rate(trials, summary["global_batch_size"])
    lines = [
        (
            entry["num_workers"],
            number_text(entry["samples_per_s"]),
            times_text(_over(entry["samples_per_s"], needed)),
        )
        for entry in entries
    ]
    shown = table(("workers", "samples/s", "of the steps' rate"), lines)
    parts = ["## Loader alone", shown, _fast_enough(entries, needed)]
    return "\n\n".join([*filter(None, parts), *_stages(entries[0]["stages"])])


def _steps_rate(trials: pd.DataFrame, global_batch_size: int) -> float | None:
    """The highest rate of steps alone, on each device: what its loader must give."""
    if trials.empty:
        return None
    alone = trials[(trials["kind"] == "compute") & (trials["status"] == "ok")]
    alone = alone[alone["global_batch_size"] == global_batch_size]
    rate = (alone["samples_per_s"] / alone["world_size"]).max()
    return None if pd.isna(rate) else float(rate)


def _over(rate: float | None, needed: float | None) -> float | None:
    return rate / needed if rate and needed else None


def _fast_enough(entries: Iterable[Mapping[str, Any]], needed: float | None) -> str:
    """The answer, by the rule with which mode tune chooses workers."""
    times = {e["num_workers"]: _over(e["samples_per_s"], needed) for e in entries}
    known = {workers: value for workers, value in times.items() if value}
    if not known:
        return "Steps alone were not measured: there is nothing to compare with."
    head = f"Steps alone take {number_text(needed)} samples/s on a device."
    for workers, value in sorted(known.items()):
        if value >= (LOADER_MARGIN if workers else FREE_LOADER):
            return f"{head} **Fast enough**: {_gives(workers, value)}."
    most = max(known, key=lambda workers: known[workers])
    return (
        f"{head} **Not fast enough**: at best {_gives(most, known[most])}; no step "
        f"waits from {LOADER_MARGIN:g} times on, without workers from {FREE_LOADER:g}."
    )


def _gives(workers: int, value: float) -> str:
    name = "1 worker" if workers == 1 else f"{workers} workers"
    return f"the loader alone gives {value:.1f} times what the steps take, with {name}"


def _stages(stages: Mapping[str, Any] | None) -> list[str]:
    """What a batch costs, stage by stage, and the batches that were slow."""
    if not stages:
        return []
    shown = ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {stages[name]:.2f} ms"
        for name in ("choose_rows_ms", "plan_ms", "collate_ms")
    )
    slow = [
        f"step {entry['step']}: {entry['ms']:.1f} ms, {entry['tokens']} tokens, "
        f"longest rows {entry['longest_rows']}"
        for entry in stages["slow"]
    ]
    limit = f"{stages['slow_count']} batches took more than {stages['slow_ms']:g} ms"
    batch = f"A batch takes {stages['batch_ms']:.2f} ms: {shown}. {limit}."
    return ["\n".join([batch, *bullets(slow)])]


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
    shown = table(("devices", "samples/s", "% of linear"), lines)
    return "\n\n".join(["## Scaling", shown, *_shared_cores(summary)])


def _shared_cores(summary: Mapping[str, Any]) -> list[str]:
    """What more processes than devices are: mode scaling does so without GPUs."""
    if max(entry["devices"] for entry in summary["scaling"]) <= summary["devices"]:
        return []
    return [
        "There is no GPU here: these devices are processes that share the same cores. "
        "What they lack to linear is not communication alone, and tells nothing about "
        "machines with a device for each process."
    ]


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
