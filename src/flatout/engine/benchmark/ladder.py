"""The `ladder` mode: add one optimisation at a time to a slow configuration.

Each optimisation is a rung. Common tips come first, in the order of the guides that
recommend them, followed by flatout's own optimisations. Each rung is added to the rungs
kept so far. To measure its effect, timing windows with and without the rung alternate.
A rung that makes training slower is reported, but later rungs are measured without it.
At the end, all kept rungs together are compared with the slow configuration. If the
rung with a larger global batch was kept, the slow configuration is first compared with
only those kept rungs that do not change the result of training. Finally, each kept rung
is left out once, and the remaining rungs are compared with all kept rungs
(leave-one-out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flatout.engine.benchmark.rungs import BATCH, SLOW, Rung, rungs
from flatout.engine.benchmark.runner import ALONE, Bench
from flatout.engine.benchmark.trials.trial_spec import (
    SETTING_BY_COLUMN,
    Changes,
    TrialResult,
    with_changes,
)

ALL, ALL_SAME = "all that was kept", "all that was kept of the same optimisation"
"""Labels of the final comparisons, with and without a larger global batch."""
KEPT_FROM = 0.98
"""A rung is left out if it lowers the throughput below this fraction."""


@dataclass(frozen=True)
class Step:
    """A row of benchmark_ladder.csv."""

    rung: int
    name: str
    samples_per_s: float | None
    individual: float | None
    """Throughput relative to that with only the rungs kept so far, from alternating
    windows."""
    cumulative: float | None
    """Throughput relative to the slow configuration: the product of the gains of all
    kept rungs. The final comparisons measure this ratio directly."""
    spread_pct: float | None
    """Interquartile range of the ratios of alternating windows divided by their median,
    in percent, or None without alternating windows."""
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str
    leave_one_out: float | None = None
    """Throughput with all kept rungs relative to that without this one, with the
    configured global batch size."""
    leave_one_out_spread_pct: float | None = None
    leave_one_out_note: str = ""
    """The rungs left out with this one, or why there is no ratio."""


@dataclass
class LadderState:
    """The changes to conf/slow that have been kept so far."""

    changes: Changes = field(default_factory=dict)
    gained: float = 1.0
    """The product of the gains of all kept rungs."""

    def complete(self, rung: Rung) -> Rung:
        """Return a copy of `rung` whose changes also include the required changes
        (`needs`) that are not yet in effect."""
        now = {**SLOW, **self.changes}
        missing = {k: v for k, v in rung.needs.items() if now[k] not in (v, "auto")}
        changes = {**missing, **rung.changes}
        if changes.get("train.cuda_graphs") == "auto" and not now["train.cuda_graphs"]:
            del changes["train.cuda_graphs"]  # the rung that adds them was left out
        return replace(rung, changes=changes)

    def keep(self, rung: Rung, ratio: float) -> None:
        self.changes.update(rung.changes)
        self.gained *= ratio


SETTLED = ("strategy", "precision", "compile", "cuda_graphs")
"""Columns of a trial that contain the resolved values of settings."""


def _used_substitute(rung: Rung, trial: TrialResult) -> bool:
    """Return whether the trial could not use the rung's feature and fell back."""
    if "runtime.attention" in rung.changes and trial.attention == "none":
        return True
    return any(
        rung.changes.get(SETTING_BY_COLUMN[name], "auto")
        not in ("auto", getattr(trial, name))
        for name in SETTLED
    )


def ladder(bench: Bench) -> Iterator[Step]:
    """Measure each rung in an end-to-end trial, and yield its row. At the end, the rows
    of kept rungs are yielded a second time with `leave_one_out` filled in."""
    chosen, climb = rungs(bench.settings), LadderState()
    kept: list[tuple[Rung, Step]] = []
    slowest = with_changes(bench.settings, SLOW)
    measured = partial(bench.compare, slowest)
    slow = bench.run("end_to_end", base=slowest, label="conf/slow", world_size=1)
    yield _step(0, Rung("conf/slow", {}), slow, 1.0, 1.0, kept=slow.ok)
    if not slow.ok:
        return
    for number, asked in enumerate(chosen, start=1):
        rung = climb.complete(asked)
        changes = {**climb.changes, **rung.changes}
        trial, ratio = measured(number, rung.name, changes, climb.changes)
        if trial.ok and _used_substitute(rung, trial):
            trial, ratio = replace(trial, status="not here"), None
        keeps = ratio is not None and ratio >= KEPT_FROM
        step = _step(number, rung, trial, ratio, climb.gained, kept=keeps)
        yield step
        if keeps:
            climb.keep(rung, ratio or 1.0)
            kept.append((rung, step))
    same, _ = without(rung for rung, _ in kept if not rung.changes_optimisation)
    larger = climb.changes != same
    ends = [Rung(ALL_SAME, same)] if larger else []
    ends.append(Rung(ALL, climb.changes, changes_optimisation=larger))
    for number, end in enumerate(ends, start=len(chosen) + 1):
        yield _end(measured, number, end)
    batch = bench.settings.train.global_batch_size
    kept = [(r, s) for r, s in kept if r.changes.get(BATCH, batch) == batch]
    yield from leave_one_out(measured, kept)


def _end(measured: Callable[..., Any], number: int, rung: Rung) -> Step:
    """Compare `rung`, which combines all kept changes, with the slow configuration in
    alternating windows, and return the row."""
    label, changes = f"{rung.name}, compared with conf/slow", dict(rung.changes)
    top, times = measured(number, label, changes, {})
    step = _step(number, replace(rung, name=label), top, times, 1.0, kept=top.ok)
    return replace(step, individual=None)


def leave_one_out(
    measured: Callable[..., Any], kept: list[tuple[Rung, Step]]
) -> Iterator[Step]:
    """For each kept rung, compare the throughput with all kept rungs to the throughput
    without this one. Yield the rung's row with `leave_one_out` filled in."""
    chosen = [rung for rung, _ in kept]
    top, _ = without(chosen)
    for rung, step in (pair for pair in kept if not pair[0].changes_optimisation):
        changes, others = without(chosen, rung)
        if changes == top:
            note = "not applicable: a later rung replaces it"
            yield replace(step, leave_one_out_note=note)
            continue
        label = f"{ALL}, without {rung.name}"
        trial, ratio = measured(-step.rung, label, changes, top)
        yield replace(
            step,
            leave_one_out=1 / ratio if ratio else None,
            leave_one_out_spread_pct=trial.times_below_spread_pct,
            leave_one_out_note=_left_out_note(trial, others),
        )


def without(
    kept: Iterable[Rung], left_out: Rung | None = None
) -> tuple[Changes, list[str]]:
    """Return the changes of all kept rungs except `left_out` and the rungs that require
    `left_out`, and the names of the rungs that require it."""
    climb, names = LadderState(), []
    for rung in kept:
        completed = climb.complete(rung)
        if rung == left_out or completed.changes.keys() - rung.changes.keys():
            names.append(rung.name)
        else:
            climb.keep(completed, 1.0)
    return climb.changes, names[1:]


def _left_out_note(trial: TrialResult, others: list[str]) -> str:
    together = f"together with {' and '.join(others)}" if others else ""
    end = f"{trial.status}: {trial.note}"
    if trial.ok:
        end = ALONE if ALONE in trial.note else ""
    return "; ".join(filter(None, (together, end)))


def _step(
    number: int,
    rung: Rung,
    trial: TrialResult,
    individual: float | None,
    gained: float,
    *,
    kept: bool,
) -> Step:
    """Return the row of a rung. `individual` is the gain of this rung, and `gained` is
    the product of the gains of the rungs kept so far."""
    return Step(
        rung=number,
        name=rung.name,
        samples_per_s=trial.samples_per_s,
        individual=individual,
        cumulative=gained * individual if individual else None,
        spread_pct=trial.times_below_spread_pct,
        kept=kept,
        changes_optimisation=rung.changes_optimisation,
        status=trial.status,
        note=trial.note,
        trial_id=trial.trial_id,
    )
