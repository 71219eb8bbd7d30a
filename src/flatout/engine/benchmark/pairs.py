"""Two configurations measured alternating, each in a separate process."""

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
"""Status of a trial whose paired process has ended."""
ALONE = "one after the other"
"""Note of a trial that could not be measured alternating."""


@dataclass
class Pairs:
    """End-to-end trials on one device, each alternating with another configuration."""

    bench: Bench

    @property
    def base(self) -> Settings:
        """Return the settings that all changes apply to."""
        return self.bench.settings

    def measure(self, label: str, changes: Changes, **options: Any) -> TrialResult:
        """Run `base` with `changes`; `options` as in TrialSpec."""
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
        """Return a trial of `changes`, and its rate divided by that of `below`:
        measured alternating, or one after the other if both do not fit at a time."""
        stored = self.stored(below)
        trial = self.measure(label, changes, below=stored)
        if trial.status not in ("oom", UNPAIRED):
            return trial, trial.times_below
        self.bench.watcher.expect_more(2)
        under = self.measure("what stands below, alone", below, again=number)
        alone = self.measure(f"{label}, alone", changes, again=number)
        return _said(alone, ALONE), ratio(alone.samples_per_s, under.samples_per_s)

    def stored(self, changes: Changes) -> dict[str, Any]:
        """Return `base` with `changes`, in the form of a trial's option `below`."""
        settings = with_changes(self.base, changes)
        return settings.model_dump(mode="json", exclude={"benchmark", "sweep"})


def _said(trial: TrialResult, note: str) -> TrialResult:
    return replace(trial, note="; ".join(part for part in (trial.note, note) if part))


def ratio(value: float | None, other: float | None) -> float | None:
    """Return value / other; None if either is missing or zero."""
    return value / other if value and other else None
