"""The ladder: the slow configuration, then one optimisation after the other.

In the order of the guides that named them (A to E), then flatout's own. A rung that
loses is measured, shown, and left out of the rungs above it. What stands alone is tried
once more on top: workers cannot help a step that waits for the host, until it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.budgets import Changes
from flatout.engine.bench.rungs import SLOW, Rung, rungs
from flatout.engine.bench.trial_spec import TrialResult, with_changes

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
    """Rate over that of the slow configuration: the product of what was kept."""
    spread_pct: float | None
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


def ladder(bench: Bench) -> Iterator[Step]:
    """Climb; every rung is a trial end to end. One that loses is measured once more,
    beside the one below it: a quick minute of the machine may have met only that."""
    bench.run("device", label="the device's peak")
    chosen = rungs(bench.settings)
    bench.watcher.expect(len(chosen) + 2)
    base = with_changes(bench.settings, SLOW)

    def measure(label: str, changes: Changes, again: int = 0) -> TrialResult:
        options = {"again": again} if again else {}
        name = f"{label}, again" if again else label
        return bench.run(
            "end_to_end", changes, base=base, label=name, world_size=1, options=options
        )

    kept: Changes = {}
    lost: list[tuple[Rung, Changes]] = []
    slow = measure("conf/slow", {})
    yield _step(0, Rung("conf/slow", "", "", {}), slow, slow, 1.0, kept=True)
    below, name, gained = slow, "conf/slow", 1.0
    for number, rung in enumerate(_in_order(chosen, lost, kept), start=1):
        changes = {**kept, **rung.changes}
        trial, beside = measure(rung.name, changes), below
        if trial.ok and not holds(trial, beside):
            beside = measure(name, dict(kept), again=number)
            trial = measure(rung.name, changes, again=number)
        keeps = holds(trial, beside)
        yield _step(number, rung, trial, beside, gained, kept=keeps)
        if keeps:
            gained *= _ratio(trial, beside) or 1.0
            kept.update(rung.changes)
            below, name = trial, rung.name
        else:
            lost.append((rung, dict(kept)))


def _in_order(
    chosen: list[Rung], lost: list[tuple[Rung, Changes]], kept: Changes
) -> Iterator[Rung]:
    """Rungs as they are climbed; `lost`, with what it lost beside, and `kept` grow."""
    yield from (rung for rung in chosen if not rung.changes_optimisation)
    for rung, beside in list(lost):
        replaced = kept.keys() & rung.changes.keys()
        if kept != beside and not replaced:
            yield replace(rung, name=f"{rung.name}, now")
    yield from (rung for rung in chosen if rung.changes_optimisation)


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
    gained: float,
    *,
    kept: bool,
) -> Step:
    """`gained`: what the rungs kept below make together."""
    individual = _ratio(trial, below)
    return Step(
        rung=number,
        name=rung.name,
        source=rung.source,
        claim=rung.claim,
        samples_per_s=trial.samples_per_s,
        individual=individual,
        cumulative=gained * individual if individual else None,
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
