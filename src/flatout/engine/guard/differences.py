"""Find differences in metrics and settings between two runs of the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.engine.parameters import in_role, is_in, reported
from flatout.engine.parameters.common import UNTIMED
from flatout.engine.parameters.other_names import RENAMED

RATE = "guard_samples_per_s"
"""The metric with the throughput of a run, which is the median over its windows."""
SYMPTOM_LIMIT = 1.03
"""A metric is reported only if it makes a step slower by more than this factor."""
NOT_SET = "not set"
"""The text that is shown if a run does not have the value."""

SHARES = {
    "padding_pct": "more of each batch is padding",
    "loader_wait_pct": "steps wait for their batches",
    "cpu_wait_pct": "other programs had the cores",
}
"""Metrics in percent of a step."""
TIMES = {"cpu_probe_ms": "the cores themselves were slower, or shared with a neighbour"}
SPEEDS = {
    "gpu_clock_mhz": "the GPU ran slower: heat, power limit or another clock setting"
}
SYMPTOMS = {**SHARES, **TIMES, **SPEEDS}

FACTS = ("world_size", "token_key", "device", "git_commit", "git_dirty")
"""Tags that do not correspond to a parameter."""


@dataclass(frozen=True)
class TrackedRun:
    """The record of a run in the file of earlier runs."""

    run_id: str
    name: str
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        return self.figures.get(RATE) or None


@dataclass(frozen=True)
class Difference:
    """A difference between two runs. `name` is a parameter, a version or a metric."""

    name: str
    then: str
    now: str
    ratio: float | None = None
    """The factor by which the metric makes a step slower; None for a setting."""
    reason: str = ""

    @property
    def is_setting(self) -> bool:
        return self.ratio is None

    def __str__(self) -> str:
        text = f"{self.name}: {self.then} -> {self.now}"
        if self.ratio is None:
            return text
        return f"{text} (measured, {self.ratio:.2f} times slower: {self.reason})"


def differences(then: TrackedRun, now: TrackedRun) -> list[Difference]:
    """Return the metrics that differ, the largest ratio first, then the settings that
    differ, sorted by name."""
    before, after = _facts(then), _facts(now)
    found = [_changed_figure(name, then, now) for name in SYMPTOMS]
    measured = [d for d in found if d and (d.ratio or 0.0) > SYMPTOM_LIMIT]
    changed = [
        Difference(name, before.get(name, NOT_SET), after.get(name, NOT_SET))
        for name in sorted(before.keys() | after.keys())
        if before.get(name, NOT_SET) != after.get(name, NOT_SET)
    ]
    return sorted(measured, key=lambda d: -(d.ratio or 0.0)) + changed


def _facts(run: TrackedRun) -> dict[str, str]:
    params = {RENAMED.get(k, k): v for k, v in run.params.items()}
    facts = {k: v for k, v in params.items() if not is_in(k, in_role(UNTIMED))}
    # Use the effective values, so that two spellings of a value are equal.
    effective = {**reported(), **{name: name for name in FACTS}}
    facts |= {effective[k]: v for k, v in run.tags.items() if k in effective}
    return facts | {k: v for k, v in run.tags.items() if k.startswith("version.")}


def _changed_figure(name: str, then: TrackedRun, now: TrackedRun) -> Difference | None:
    before, after = then.figures.get(name), now.figures.get(name)
    if before is None or after is None:
        return None
    if name in SHARES:
        ratio = max(100 - before, 1.0) / max(100 - after, 1.0)
    else:
        slow, fast = (after, before) if name in TIMES else (before, after)
        ratio = slow / fast if fast else 1.0
    return Difference(name, f"{before:.1f}", f"{after:.1f}", ratio, SYMPTOMS[name])
