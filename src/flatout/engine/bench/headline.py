"""The headline: `conf/slow`, the Hugging Face Trainer and flatout, one device, one run.

Rates alone, of windows after a warm-up; mode peers compares what is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.budgets import Changes
from flatout.engine.bench.contests import contenders
from flatout.engine.bench.rungs import SLOW
from flatout.engine.bench.trial_spec import Kind, TrialResult

WINDOW_SAMPLES = 25_600
"""Of the Trainer's windows: 6 s at 4,000 samples/s."""
WINDOW_STEPS = (12, 50)
WINDOWS = 3
WARMUP_STEPS = {"trainer-best-compiled": 250}
"""Until graphs for the lengths that occur are there; of the others WINDOW_STEPS[1]."""
FLATOUT = "flatout"


@dataclass(frozen=True)
class Line:
    """A trial to run."""

    label: str
    kind: Kind
    changes: Changes
    options: dict[str, Any] = field(default_factory=dict)


def run(bench: Bench) -> None:
    """A trial a line; the device's peak first, for the share of it that is used."""
    lines = list(headline_lines(bench))
    bench.watcher.expect(len(lines) + 1)
    bench.run("device", label="the device's peak")
    for line in lines:
        bench.run(
            line.kind,
            line.changes,
            label=line.label,
            options=line.options,
            world_size=1,
        )


def headline_lines(bench: Bench) -> Iterator[Line]:
    """At the user's global batch; where it is free, at each of `batch_sizes` too.
    flatout also at the slow configuration's own."""
    settings, options = bench.settings, bench.options
    sizes = {settings.train.global_batch_size}
    if options.free_global_batch:
        sizes |= set(options.batch_sizes)
    names = contenders(bench)
    yield Line("conf/slow", "end_to_end", SLOW)
    for size in sorted(sizes):
        for name in (name for name in names if name != FLATOUT):
            yield _trainer(name, size)
    if FLATOUT in names:
        for size in sorted({SLOW["train.global_batch_size"], *sizes}):
            changes = {"train.global_batch_size": size}
            yield Line(f"{FLATOUT}, batch {size}", "end_to_end", changes)


def _trainer(name: str, size: int) -> Line:
    fewest, most = WINDOW_STEPS
    window = max(fewest, min(most, WINDOW_SAMPLES // size))
    warmup = WARMUP_STEPS.get(name, most)
    steps = {"train.max_steps": warmup + WINDOWS * window, "train.epochs": 10_000}
    return Line(
        f"{name}, batch {size}",
        "peer",
        {"train.global_batch_size": size, **steps},
        {
            "contender": name,
            "evaluations": 1,
            "warmup_steps": warmup,
            "window_steps": window,
        },
    )


def headline_rows(bench: Bench) -> list[dict[str, Any]]:
    """Each line's rate, and its ratio to the slow one and to the Trainer's best."""
    trials = [t for t in bench.results if t.kind in ("end_to_end", "peer")]
    slow = next((t.samples_per_s for t in trials if t.label == "conf/slow"), None)
    trainer = max(_rates(trials, "peer"), default=None)
    peaks = [f.get("peak_tflops_measured") for f in bench.figures.values()]
    peak = next((value for value in peaks if value), None)
    return [
        {
            "name": trial.label,
            "samples_per_s": trial.samples_per_s,
            "over_slow": _ratio(trial.samples_per_s, slow),
            "over_trainer": _ratio(trial.samples_per_s, trainer),
            "spread_pct": trial.samples_per_s_spread_pct,
            "tflops_per_s": trial.tflops_per_s,
            "share_of_measured_peak": _ratio(trial.tflops_per_s, peak),
            "reserved_memory_gib": trial.reserved_memory_gib,
            "first_step_s": trial.first_step_s,
            "status": trial.status,
            "note": trial.note,
            "flags": bench.figures[trial.trial_id].get("flags"),
        }
        for trial in trials
    ]


def _rates(trials: list[TrialResult], kind: Kind) -> list[float]:
    return [t.samples_per_s for t in trials if t.kind == kind and t.samples_per_s]


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None
