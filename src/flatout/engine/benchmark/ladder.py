"""The `ladder` mode: add one optimisation at a time to a slow configuration.

Common tips come first, in the order of the guides that name them, followed by flatout's
own optimisations. The windows of each rung alternate with windows of all rungs kept so
far. A rung that makes training slower is reported, but left out of the rungs above it.
At the end, all kept rungs together are compared with the slow configuration. If a
larger global batch was kept, the rungs that do not change the optimisation are first
compared with it on their own.
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
"""Labels of the final comparisons, with and without a larger global batch."""
KEPT_FROM = 0.98
"""A rung is left out if the throughput with it is below this fraction of the
throughput without it."""


@dataclass(frozen=True)
class Step:
    """A row of benchmark_ladder.csv."""

    rung: int
    name: str
    samples_per_s: float | None
    individual: float | None
    """Throughput relative to the rungs kept so far, from alternating windows."""
    cumulative: float | None
    """Throughput relative to the slow configuration: the product of the kept gains,
    except in the final comparisons, which measure it directly."""
    spread_pct: float | None
    """Interquartile range of these ratios divided by their median, in percent. The
    first row has no ratios: its spread is (highest - lowest) / median of throughput."""
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


@dataclass
class LadderState:
    """The changes to conf/slow that have been kept so far."""

    changes: Changes = field(default_factory=dict)
    same: Changes = field(default_factory=dict)
    """The kept changes that do not change the optimisation (the global batch size)."""
    gained: float = 1.0
    """The product of the gains of all kept rungs."""

    def complete(self, rung: Rung) -> Rung:
        """Return `rung` with its required changes, except those already in effect."""
        now = {**SLOW, **self.changes}
        missing = {k: v for k, v in rung.needs.items() if now[k] not in (v, "auto")}
        changes = {**missing, **rung.changes}
        if changes.get("train.cuda_graphs") == "auto" and not now["train.cuda_graphs"]:
            del changes["train.cuda_graphs"]  # the rung that adds them was left out
        return replace(rung, changes=changes)

    def keep(self, rung: Rung, ratio: float) -> None:
        self.changes.update(rung.changes)
        self.gained *= ratio
        if not rung.changes_optimisation:
            self.same = dict(self.changes)


SETTLED = ("strategy", "precision", "compile", "cuda_graphs")
"""Columns of a trial that hold the resolved values of settings."""


def _used_substitute(rung: Rung, trial: TrialResult) -> bool:
    """Return whether the trial fell back to a substitute, because the device or the
    model does not support the rung's feature."""
    if "runtime.attention" in rung.changes and trial.attention == "none":
        return True
    return any(
        rung.changes.get(SETTING_BY_COLUMN[name], "auto")
        not in ("auto", getattr(trial, name))
        for name in SETTLED
    )


def ladder(bench: Bench) -> Iterator[Step]:
    """Measure the rungs one after another, each in an end-to-end trial, and yield a row
    for each."""
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
    """Compare all kept changes with the slow configuration in alternating windows."""
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
    """Return the row of a rung. `gained` is the product of the gains kept so far."""
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
