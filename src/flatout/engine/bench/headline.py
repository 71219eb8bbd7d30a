"""The headline: `conf/slow`, the Hugging Face Trainer and flatout, one device, one run.

Rates alone, of windows after a warm-up; mode peers compares what is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.contests import Contest, contenders
from flatout.engine.bench.rungs import SLOW
from flatout.engine.bench.trial_spec import Kind, TrialResult
from flatout.engine.settings import SettingsError

WINDOWS = 3
COMPILED_WARMUP_STEPS = 250
"""Until the compiled Trainer has graphs for the lengths that occur."""
FLATOUT, UNSORTED = "flatout", "trainer-unsorted"


def headline_contests(bench: Bench) -> Iterator[Contest]:
    """At the user's global batch; where it is free, at each of `batch_sizes` too.
    flatout also at the slow configuration's own."""
    settings, options = bench.settings, bench.options
    sizes = {settings.train.global_batch_size}
    if options.free_global_batch:
        sizes |= set(options.batch_sizes)
    # Sorting is among the Trainer's best flags where rates alone count.
    names = [name for name in contenders(bench) if name != UNSORTED]
    if not names:
        raise SettingsError(
            f"benchmark.contenders: {UNSORTED} is for mode peers, which tells what was "
            "learnt; add flatout or trainer-best"
        )
    yield Contest("conf/slow", "end_to_end", SLOW)
    for size in sorted(sizes):
        for name in (name for name in names if name != FLATOUT):
            yield _trainer(name, size, bench.train_rows)
    if FLATOUT in names:
        for size in sorted({SLOW["train.global_batch_size"], *sizes}):
            changes = {"train.global_batch_size": size}
            yield Contest(f"{FLATOUT}, batch {size}", "end_to_end", changes)


def sorted_steps(size: int, rows: int) -> int:
    """Steps over which the Trainer sorts rows by length, longest first (transformers,
    `get_length_grouped_indices`): a window speaks for all rows where it is one such
    stretch. An epoch holds at least four of them."""
    return max(1, min(rows // (4 * size), 50))


def _trainer(name: str, size: int, rows: int) -> Contest:
    warmup = window = sorted_steps(size, rows)
    if name == "trainer-best-compiled":
        epoch = math.ceil(rows / size)
        warmup = epoch * math.ceil(COMPILED_WARMUP_STEPS / epoch)
    steps = {"train.max_steps": warmup + WINDOWS * window, "train.epochs": 10_000}
    return Contest(
        f"{name}, batch {size}",
        "peer",
        {"train.global_batch_size": size, **steps},
        {
            "contender": name,
            "evaluations": 0,
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
