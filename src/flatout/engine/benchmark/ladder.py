"""The ladder: the slow configuration, then one optimisation after the other.

Common tips are first, in the order of the guides that name them, then flatout's. Each
rung is measured alternating with the rungs kept below it, window by window. A rung that
loses is shown and left out of the rungs above it. At the end all kept
rungs are compared with the slow configuration; if a larger global batch was kept, the
rungs that do not change the optimisation are compared first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flatout.engine.benchmark.rungs import SLOW, Rung, rungs
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import (
    SETTING_BY_COLUMN,
    Changes,
    TrialResult,
    with_changes,
)

ALL, ALL_SAME = "all that was kept", "all that was kept of the same optimisation"
"""Labels of the last rungs: with a larger global batch, and without."""
KEPT_FROM = 0.98
"""A rung whose rate is below this share of the rate of the rung below is left out."""


@dataclass(frozen=True)
class Step:
    """One row of benchmark_ladder.csv."""

    rung: int
    name: str
    samples_per_s: float | None
    individual: float | None
    """Rate divided by that of the rungs kept below, measured alternating."""
    cumulative: float | None
    """Rate divided by that of the slow configuration: the product of the kept gains; in
    the last rows, the measured ratio."""
    spread_pct: float | None
    """Spread of the middle half of these ratios; for a trial without a pair (the first
    row), (highest - lowest) / median of its rates."""
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


@dataclass
class LadderState:
    """The changes to conf/slow that were kept so far."""

    changes: Changes = field(default_factory=dict)
    same: Changes = field(default_factory=dict)
    """The kept changes that do not affect the optimizer."""
    gained: float = 1.0
    """Product of the gains that were kept."""

    def complete(self, rung: Rung) -> Rung:
        """Return `rung` with the required changes that the rungs below lack."""
        now = {**SLOW, **self.changes}
        missing = {k: v for k, v in rung.needs.items() if now[k] not in (v, "auto")}
        changes = {**missing, **rung.changes}
        if changes.get("train.cuda_graphs") == "auto" and not now["train.cuda_graphs"]:
            del changes["train.cuda_graphs"]  # graphs that lost are not used again
        return replace(rung, changes=changes)

    def keep(self, rung: Rung, ratio: float) -> None:
        self.changes.update(rung.changes)
        self.gained *= ratio
        if not rung.changes_optimisation:
            self.same = dict(self.changes)


SETTLED = ("strategy", "precision", "compile", "cuda_graphs")
"""Columns of a trial with resolved values."""


def _used_substitute(rung: Rung, trial: TrialResult) -> bool:
    """Return whether the trial measured something else, because the device or the model
    lacks the feature and a substitute was used."""
    if "runtime.attention" in rung.changes and trial.attention == "none":
        return True
    return any(
        rung.changes.get(SETTING_BY_COLUMN[name], "auto")
        not in ("auto", getattr(trial, name))
        for name in SETTLED
    )


def ladder(bench: Bench) -> Iterator[Step]:
    """Climb the ladder; every rung is an end-to-end trial."""
    chosen, climb = rungs(bench.settings), LadderState()
    slowest = with_changes(bench.settings, SLOW)
    measured = partial(bench.compare, slowest)
    slow = bench.run("end_to_end", base=slowest, label="conf/slow", world_size=1)
    yield _step(0, Rung("conf/slow", {}), slow, 1.0, 1.0, kept=slow.ok)
    if not slow.ok:
        return
    number = 0
    for number, asked in enumerate(chosen, start=1):
        rung = climb.complete(asked)
        changes = {**climb.changes, **rung.changes}
        trial, ratio = measured(number, rung.name, changes, climb.changes)
        if trial.ok and _used_substitute(rung, trial):
            trial, ratio = replace(trial, status="not here"), None
        keeps = ratio is not None and ratio >= KEPT_FROM
        yield _step(number, rung, trial, ratio, climb.gained, kept=keeps)
        if keeps:
            climb.keep(rung, ratio or 1.0)
    if climb.changes == climb.same:
        yield _end(measured, number + 1, Rung(ALL, climb.same))
        return
    yield _end(measured, number + 1, Rung(ALL_SAME, climb.same))
    end = Rung(ALL, climb.changes, changes_optimisation=True)
    yield _end(measured, number + 2, end)


def _end(measured: Callable[..., Any], number: int, rung: Rung) -> Step:
    """Measure all kept changes, alternating with the ladder's first configuration."""
    label, changes = f"{rung.name}, compared with conf/slow", dict(rung.changes)
    top, times = measured(number, label, changes, {})
    step = _step(number, replace(rung, name=label), top, times, 1.0, kept=top.ok)
    return replace(step, individual=None)


def _step(
    number: int,
    rung: Rung,
    trial: TrialResult,
    individual: float | None,
    gained: float,
    *,
    kept: bool,
) -> Step:
    """Return the row of a rung. `gained`: product of the kept gains below."""
    return Step(
        rung=number,
        name=rung.name,
        samples_per_s=trial.samples_per_s,
        individual=individual,
        cumulative=gained * individual if individual else None,
        spread_pct=(
            trial.samples_per_s_spread_pct
            if trial.times_below is None
            else trial.times_below_spread_pct
        ),
        kept=kept,
        changes_optimisation=rung.changes_optimisation,
        status=trial.status,
        note=trial.note,
        trial_id=trial.trial_id,
    )
