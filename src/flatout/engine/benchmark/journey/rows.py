"""What the turns of a journey come to: a row a contender and start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from flatout.engine.benchmark.trials.trial_spec import TrialResult

FLATOUT = "flatout"
Figures = Mapping[str, Mapping[str, Any]]
"""What each trial left, by trial_id."""


def journey_rows(
    trials: Sequence[TrialResult], figures: Figures
) -> list[dict[str, Any]]:
    """Of the median turn: seconds by phase, and what was trained."""
    turns: dict[tuple[str, str], list[TrialResult]] = {}
    for trial in (t for t in trials if t.kind == "journey"):
        name, start, _ = trial.label.split(", ")
        turns.setdefault((name, start), []).append(trial)
    rows = [_row(*key, found, figures) for key, found in turns.items()]
    return [_beside(row, rows) for row in rows]


def _row(
    name: str, start: str, trials: Sequence[TrialResult], figures: Figures
) -> dict[str, Any]:
    good = sorted((t for t in trials if t.ok), key=lambda trial: trial.elapsed_s)
    # Of two turns in the middle the mean: phases still add up to the median.
    middle = good[(len(good) - 1) // 2 : len(good) // 2 + 1]
    found = [figures[trial.trial_id] for trial in middle]
    bad = next((trial for trial in trials if not trial.ok), None)
    return {
        "name": f"{name}, {start}",
        "contender": name,
        "start": start,
        "turns_s": [trial.elapsed_s for trial in trials if trial.ok],
        "median_s": fmean(t.elapsed_s for t in middle) if middle else None,
        **(found[-1] if found else {}),
        "phases_s": _mean([one["phases_s"] for one in found]),
        "failed": asdict(bad) if bad else None,
    }


def _mean(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in phases for name in one)
    return {name: fmean(one.get(name, 0.0) for one in phases) for name in names}


def _beside(row: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """With its time over that of the fastest script of the same start."""
    scripts = [
        one["median_s"]
        for one in rows
        if one["contender"] != FLATOUT and one["start"] == row["start"]
    ]
    best = min((s for s in scripts if s), default=None)
    ratio = row["median_s"] / best if best and row["median_s"] else None
    return {**row, "over_best_script": ratio}
