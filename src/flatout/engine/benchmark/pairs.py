"""Two configurations measured alternating, each in a separate process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import (
    Changes,
    TrialResult,
    with_changes,
)
from flatout.engine.parameters import Settings

UNPAIRED = "unpaired"
"""Status of a trial whose paired process has ended."""
ALONE = "one after the other"
"""Note of a trial that could not be measured alternating."""


def compare(
    bench: Bench,
    base: Settings,
    number: int,
    label: str,
    changes: Changes,
    reference: Changes,
) -> tuple[TrialResult, float | None]:
    """Return an end-to-end trial of `base` with `changes`, on one device, and its rate
    divided by that of `base` with the changes `reference`: measured alternating, or one
    after the other if both do not fit at a time."""
    stored = with_changes(base, reference).model_dump(
        mode="json", exclude={"benchmark", "sweep"}
    )
    run = partial(bench.run, "end_to_end", base=base, world_size=1)
    trial = run(changes, label=label, options={"below": stored})
    if trial.status not in ("oom", UNPAIRED):
        return trial, trial.times_below
    again = {"again": number}
    under = run(reference, label="the reference, alone", options=again)
    alone = run(changes, label=f"{label}, alone", options=again)
    note = "; ".join(filter(None, (alone.note, ALONE)))
    times = ratio(alone.samples_per_s, under.samples_per_s)
    return replace(alone, note=note), times


def ratio(value: float | None, other: float | None) -> float | None:
    """Return value / other; None if either is missing or zero."""
    return value / other if value and other else None
