"""Compare a run's throughput with that of earlier runs of the same workload, and list
possible causes of a slowdown.

Earlier runs are stored in a file in the data folder, one run per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

import xxhash

from flatout.engine.parameters import (
    GuardSettings,
    Settings,
    in_role,
    is_in,
    reported,
)
from flatout.engine.parameters.common import UNTIMED
from flatout.engine.parameters.other_names import RENAMED

STEP = "step_ms_p50"
WAIT = "cpu_wait_pct"
BUSY_WAIT_PCT = 10.0
"""A run that waited for a CPU core for more than this percentage of the time is
classified as `busy` instead of `slow`."""
MIN_WINDOWS = 3
"""The minimum number of timed windows after the warm-up that a comparison needs."""

RATE = "guard_samples_per_s"
"""The metric that contains a run's throughput: the median over its windows."""
SYMPTOM_LIMIT = 1.03
"""A metric is reported only if it slows down steps by more than this factor."""
MOST_SHOWN = 5
"""Maximum number of differences in the log. guard.json contains all of them."""
NOT_SET = "not set"
"""The text shown for a setting that was not recorded for a run."""

SYMPTOMS = {
    "padding_pct": "more of each batch is padding",
    "loader_wait_pct": "steps wait for their batches",
    WAIT: "other programs used the cores",
    "gpu_clock_mhz": "the GPU ran slower: heat, power limit or another clock setting",
}
"""Metrics that explain a slower step, with the text shown for each. All of them except
the clock speed are percentages."""

FACTS = ("world_size", "token_key", "device", "git_commit", "git_dirty")
"""Tags that are compared although they are not parameters."""


State = Literal["first", "unknown", "healthy", "busy", "slow"]


class SlowRunError(RuntimeError):
    """Raised if throughput is below the healthy range and guard.on_slow is `fail`."""

    exit_code = 7


@dataclass(frozen=True)
class TrackedRun:
    """A run as recorded in the file of earlier runs."""

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
    """A difference between an earlier run (`then`) and the current run (`now`). `name`
    is the name of a parameter, a version or a metric."""

    name: str
    then: str
    now: str
    ratio: float | None = None
    """The factor by which the metric slows down a step, or None for a setting."""
    reason: str = ""

    @property
    def is_setting(self) -> bool:
        return self.ratio is None

    def __str__(self) -> str:
        text = f"{self.name}: {self.then} -> {self.now}"
        if self.ratio is None:
            return text
        return f"{text} (measured, {self.ratio:.2f} times slower: {self.reason})"


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a run with its baseline. `rate_pct` and `step_pct` are
    the run's throughput and step time as percentages of the baseline's."""

    state: State
    text: str
    baseline: str | None = None
    """The run ID of the baseline."""
    rate_pct: float | None = None
    step_pct: float | None = None
    differences: list[Difference] = field(default_factory=list)


def work_key(settings: Settings, token_key: str) -> str:
    """Return a hash that identifies a workload: the model, the tokens and the global
    batch size. The precision, padding, kernels, loader and devices are not part of the
    hash, because the guard compares runs that differ in these settings."""
    model = settings.model.model_dump(mode="json")
    batch = settings.train.global_batch_size
    text = json.dumps([token_key, model, settings.tokenize.max_length, batch])
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_runs(file: Path) -> list[TrackedRun]:
    """Read the runs in `file`, one JSON object per line. Invalid lines are skipped."""
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    found = []
    for line in text.splitlines():
        with suppress(ValueError, TypeError):
            found.append(TrackedRun(**json.loads(line)))
    return found


def append_run(file: Path, run: TrackedRun) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(run)) + "\n")


def choose_baseline(runs: Sequence[TrackedRun], now: TrackedRun) -> TrackedRun | None:
    """Return the fastest of `runs` with the same workload on the same device as `now`,
    or None if there is none. Runs with the same precision and number of ranks are
    preferred, because users choose these deliberately. A run that was reported as slow
    is returned only if there is no other run."""

    def like_now(runs: Sequence[TrackedRun], *names: str) -> list[TrackedRun]:
        return [r for r in runs if all(r.tags.get(n) == now.tags.get(n) for n in names)]

    found = [run for run in runs if run.samples_per_s]
    found = like_now(found, "work_key", "device")
    found = [run for run in found if run.tags.get("guard") != "slow"] or found
    found = like_now(found, "precision", "world_size") or found
    return max(found, key=lambda run: run.samples_per_s or 0.0, default=None)


def typical_rate(rates: Sequence[float]) -> float | None:
    """Return the median of `rates` (samples/s), or None if there are fewer than
    MIN_WINDOWS values."""
    return median(rates) if len(rates) >= MIN_WINDOWS else None


def judge(
    now: TrackedRun,
    rates: Sequence[float],
    baseline: TrackedRun | None,
    settings: GuardSettings,
) -> Verdict:
    """Return the result of comparing the run `now` with `baseline`. `rates` contains
    the throughput of `now` in each window after the warm-up, in samples/s."""
    rate = typical_rate(rates)
    if rate is None:
        return Verdict(
            "unknown",
            f"guard: not compared, because only {len(rates)} of the {MIN_WINDOWS} "
            "windows needed were measured after the warm-up: train more steps, or "
            "lower train.log_every",
        )
    if baseline is None:
        return Verdict(
            "first",
            "guard: the first run of this workload on this device; later runs are "
            f"compared with its {rate:.0f} samples/s",
        )
    return _compared_with(now, rates, baseline, settings)


def _compared_with(
    now: TrackedRun,
    rates: Sequence[float],
    baseline: TrackedRun,
    settings: GuardSettings,
) -> Verdict:
    rate, before, found = (
        median(rates),
        baseline.figures[RATE],
        differences(baseline, now),
    )
    rate_pct = 100 * rate / before
    text = (
        f"guard: {rate:.0f} samples/s in the median window, {rate_pct:.0f} % of the "
        f"baseline's {before:.0f} (run {baseline.name}, {baseline.run_id})"
    )
    step_pct = None
    if (then_ms := baseline.figures.get(STEP)) and (now_ms := now.figures.get(STEP)):
        step_pct = 100 * now_ms / then_ms
        text += f"; a step takes {step_pct:.0f} % of its step time"
    state: State = "healthy"
    if rate_pct < settings.healthy_low_pct:
        upper_pct = 100 * quantiles(rates, n=4, method="inclusive")[2] / before
        excuse = _cause_outside_settings(now, upper_pct, found, settings)
        state = "busy" if excuse else "slow"
        text += f". No alarm: {excuse}" if excuse else _slow_text(found)
    return Verdict(state, text, baseline.run_id, rate_pct, step_pct, found)


def _cause_outside_settings(
    now: TrackedRun,
    upper_pct: float,
    found: Sequence[Difference],
    settings: GuardSettings,
) -> str | None:
    """Return a cause of the low throughput other than the settings. Return None if a
    setting in `found` differs, or if no cause is known. `upper_pct` is the upper
    quartile of the windows' throughput as a percentage of the baseline's throughput."""
    if any(d.is_setting and not d.name.startswith("git_") for d in found):
        return None
    wait_pct = now.figures.get(WAIT, 0.0)
    if wait_pct > BUSY_WAIT_PCT:
        return f"other programs used the cores for {wait_pct:.0f} % of the time"
    if upper_pct >= settings.healthy_low_pct:
        return f"a quarter of its windows reach {upper_pct:.0f} %"
    return None


def _slow_text(found: Sequence[Difference]) -> str:
    if not found:
        return (
            ". No recorded setting differs: check the other programs on the machine "
            "(top, nvidia-smi) and the disk"
        )
    shown = "".join(f"\n  {one}" for one in found[:MOST_SHOWN])
    return (
        f". Differences (all {len(found)} are in guard.json):{shown}\nSet the "
        "parameters back; or, if this is intended, remove the line of the faster run "
        "from data/08_reporting/runs.jsonl"
    )


def differences(then: TrackedRun, now: TrackedRun) -> list[Difference]:
    """Return the differences between two runs: first the metrics that explain a
    slowdown, largest ratio first, then the settings that differ, sorted by name."""
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
    # Use the effective values, so that different spellings of a value are equal.
    effective = {**reported(), **{name: name for name in FACTS}}
    facts |= {effective[k]: v for k, v in run.tags.items() if k in effective}
    return facts | {k: v for k, v in run.tags.items() if k.startswith("version.")}


def _changed_figure(name: str, then: TrackedRun, now: TrackedRun) -> Difference | None:
    before, after = then.figures.get(name), now.figures.get(name)
    if before is None or not after:
        return None  # a percentage of 0 slows nothing down
    ratio = before / after
    if name.endswith("_pct"):
        ratio = max(100 - before, 1.0) / max(100 - after, 1.0)
    return Difference(name, f"{before:.1f}", f"{after:.1f}", ratio, SYMPTOMS[name])
