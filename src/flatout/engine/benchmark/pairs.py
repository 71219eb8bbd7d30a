"""Two configurations by turns, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import (
    Changes,
    TrialResult,
    with_changes,
)
from flatout.engine.parameters import Settings

UNPAIRED = "unpaired"
"""Status of a trial beside which the other process has ended."""
ALONE = "one after the other"
"""Noted of a trial that could not be measured by turns."""


@dataclass
class Pairs:
    """Trials end to end of one device, each by turns with another configuration."""

    bench: Bench

    @property
    def base(self) -> Settings:
        """What all changes are made to."""
        return self.bench.settings

    def measure(self, label: str, changes: Changes, **options: Any) -> TrialResult:
        """`base` with `changes`; `options` as in TrialSpec."""
        return self.bench.run(
            "end_to_end",
            changes,
            base=self.base,
            label=label,
            world_size=1,
            options=options,
        )

    def beside(
        self, number: int, label: str, changes: Changes, below: Changes
    ) -> tuple[TrialResult, float | None]:
        """A trial of `changes`, and its rate over that of `below`: by turns, or one
        after the other where two at a time are too much."""
        stored = self.stored(below)
        trial = self.measure(label, changes, below=stored)
        if trial.status not in ("oom", UNPAIRED):
            return trial, trial.times_below
        self.bench.watcher.expect_more(2)
        under = self.measure("what stands below, alone", below, again=number)
        alone = self.measure(f"{label}, alone", changes, again=number)
        return _said(alone, ALONE), ratio(alone.samples_per_s, under.samples_per_s)

    def stored(self, changes: Changes) -> dict[str, Any]:
        """Of `base` with `changes`, as a trial's option `below` names it."""
        settings = with_changes(self.base, changes)
        return settings.model_dump(mode="json", exclude={"benchmark", "sweep"})


def _said(trial: TrialResult, note: str) -> TrialResult:
    return replace(trial, note="; ".join(part for part in (trial.note, note) if part))


def ratio(value: float | None, other: float | None) -> float | None:
    """None where either is missing or zero."""
    return value / other if value and other else None
