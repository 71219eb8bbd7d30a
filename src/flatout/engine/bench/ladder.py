"""The ladder: the slow configuration, then one optimisation after the other.

In the order of the guides that named them (A to E), then flatout's own. A rung that
loses is measured, shown, and left out of the rungs above it. What stands alone is tried
once more on top: workers cannot help a step that waits for the host, until it does not.
In the end the slow one and what was kept are measured again, one beside the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.budgets import Changes
from flatout.engine.bench.rungs import SLOW, Rung, rungs
from flatout.engine.bench.trial_spec import TrialResult, with_changes

KEPT_FROM = 0.98
"""A rung that makes the rate less than this share of the one below is left out."""
CLEAR_GAIN = 1.25
"""What gains less, or loses, is measured once more beside the one below it, and the
mean of both counts. Were losses alone measured again, gains by a quick minute would
stay: on two busy cores the rungs' product came to 5.6 times where it was 1.4."""


@dataclass(frozen=True)
class Step:
    """A line of benchmark_ladder.csv."""

    rung: int
    name: str
    source: str
    claim: str
    samples_per_s: float | None
    individual: float | None
    """Rate over that of the rungs kept below, measured beside it."""
    cumulative: float | None
    """Rate over that of the slow configuration: the product of what was kept; of the
    last line as measured, one beside the other."""
    spread_pct: float | None
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


@dataclass
class Climb:
    """What was kept so far."""

    bench: Bench
    changes: Changes = field(default_factory=dict)
    name: str = "conf/slow"
    gained: float = 1.0
    """Product of the gains that were kept."""

    def measure(self, label: str, changes: Changes, again: int = 0) -> TrialResult:
        options = {"again": again} if again else {}
        base = with_changes(self.bench.settings, SLOW)
        name = f"{label}, again" if again else label
        return self.bench.run(
            "end_to_end", changes, base=base, label=name, world_size=1, options=options
        )

    def compare(
        self, rung: Rung, number: int, below: TrialResult
    ) -> tuple[TrialResult, float | None, TrialResult]:
        """A trial of `rung`, its rate over that of what was kept below, and the last
        trial of that: an hour later the first one would say nothing."""
        changes = {**self.changes, **rung.changes}
        trial = self.measure(rung.name, changes)
        ratio = _ratio(trial, below)
        if ratio is None or ratio >= CLEAR_GAIN:
            return trial, ratio, below
        beside = self.measure(self.name, dict(self.changes), again=number)
        trial = self.measure(rung.name, changes, again=number)
        again = _ratio(trial, beside)
        return trial, math.sqrt(ratio * again) if again else None, beside

    def keep(self, rung: Rung, ratio: float) -> None:
        self.changes.update(rung.changes)
        self.name, self.gained = rung.name, self.gained * ratio


def ladder(bench: Bench) -> Iterator[Step]:
    """Climb; every rung is a trial end to end."""
    bench.run("device", label="the device's peak")
    chosen, climb = rungs(bench.settings), Climb(bench)
    bench.watcher.expect(len(chosen) + 2)
    below = climb.measure("conf/slow", {})
    yield _step(0, Rung("conf/slow", "", "", {}), below, 1.0, 1.0, kept=below.ok)
    if not below.ok:
        return
    lost: list[tuple[Rung, Changes]] = []
    number = 0
    for number, rung in enumerate(_in_order(chosen, lost, climb.changes), start=1):
        trial, ratio, below = climb.compare(rung, number, below)
        keeps = ratio is not None and ratio >= KEPT_FROM
        yield _step(number, rung, trial, ratio, climb.gained, kept=keeps)
        if keeps:
            climb.keep(rung, ratio or 1.0)
            below = trial
        else:
            lost.append((rung, dict(climb.changes)))
    yield _end(climb, number + 1)


def _end(climb: Climb, number: int) -> Step:
    """The whole ladder in two trials that follow one another."""
    slow = climb.measure("conf/slow", {}, again=number)
    top = climb.measure(climb.name, dict(climb.changes), again=number)
    rung = Rung("all that was kept, beside conf/slow", "", "", {})
    step = _step(number, rung, top, _ratio(top, slow), 1.0, kept=top.ok)
    return replace(step, individual=None)


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


def _step(
    number: int,
    rung: Rung,
    trial: TrialResult,
    individual: float | None,
    gained: float,
    *,
    kept: bool,
) -> Step:
    """`gained`: what the rungs kept below make together."""
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
