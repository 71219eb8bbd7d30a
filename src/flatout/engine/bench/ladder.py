"""The ladder: the slow configuration, then one optimisation after the other.

In the order of the guides that named them (A to E), then flatout's own. A rung that
loses is measured, shown, and left out of the rungs above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.rungs import SLOW, Rung, rungs
from flatout.engine.bench.trial_spec import TrialResult, with_changes
from flatout.engine.settings import Settings

KEPT_FROM = 0.98
"""A rung that makes the rate less than this share of the one below is left out."""


@dataclass(frozen=True)
class Step:
    """A line of benchmark_ladder.csv."""

    rung: int
    name: str
    source: str
    claim: str
    samples_per_s: float | None
    individual: float | None
    """Rate over that of the rungs kept below."""
    cumulative: float | None
    """Rate over that of the slow configuration."""
    spread_pct: float | None
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


def ladder(bench: Bench) -> Iterator[Step]:
    """Climb; every rung is a trial end to end."""
    bench.run("device", label="the device's peak")
    chosen = rungs(bench.settings)
    bench.watcher.expect(len(chosen) + 2)
    base = with_changes(bench.settings, SLOW)
    kept: dict[str, Any] = {}
    slow = bench.run("end_to_end", base=base, label="conf/slow", world_size=1)
    yield _step(0, Rung("conf/slow", "", "", {}), slow, slow, slow, kept=True)
    below = slow
    for number, rung in enumerate(chosen, start=1):
        trial = bench.run(
            "end_to_end",
            {**kept, **rung.changes},
            base=base,
            label=rung.name,
            world_size=1,
        )
        if trial.ok and not holds(trial, below):
            trial = _again(bench, trial, {**kept, **rung.changes}, base)
        keeps = holds(trial, below)
        yield _step(number, rung, trial, below, slow, kept=keeps)
        if keeps:
            kept, below = {**kept, **rung.changes}, trial


def _again(
    bench: Bench, first: TrialResult, changes: Mapping[str, Any], base: Settings
) -> TrialResult:
    """The faster of two tries: what disturbs a trial can only slow it."""
    second = bench.run(
        "end_to_end",
        changes,
        base=base,
        label=f"{first.label}, again",
        world_size=1,
        options={"again": True},
    )
    return max(first, second, key=lambda trial: trial.samples_per_s or 0.0)


def holds(trial: TrialResult, below: TrialResult) -> bool:
    """Whether a rung stays: it works, and costs no more than noise."""
    if not trial.ok or not trial.samples_per_s:
        return False
    return trial.samples_per_s >= KEPT_FROM * (below.samples_per_s or 0.0)


def _step(
    number: int,
    rung: Rung,
    trial: TrialResult,
    below: TrialResult,
    slow: TrialResult,
    *,
    kept: bool,
) -> Step:
    return Step(
        rung=number,
        name=rung.name,
        source=rung.source,
        claim=rung.claim,
        samples_per_s=trial.samples_per_s,
        individual=_ratio(trial, below),
        cumulative=_ratio(trial, slow),
        spread_pct=trial.samples_per_s_spread_pct,
        kept=kept,
        changes_optimisation=rung.changes_optimisation,
        status=trial.status,
        note=trial.note,
        trial_id=trial.trial_id,
    )


def _ratio(trial: TrialResult, other: TrialResult) -> float | None:
    if not trial.samples_per_s or not other.samples_per_s:
        return None
    return trial.samples_per_s / other.samples_per_s
