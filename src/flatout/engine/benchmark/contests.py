"""Who is measured against whom: modes peers, headline and scaling.

Peers train the same whole, and what is learnt is compared. The headline is rates alone,
of windows after a warm-up: `conf/slow`, the Hugging Face Trainer and flatout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatout.engine.benchmark.budgets import Changes
from flatout.engine.benchmark.pairs import ratio
from flatout.engine.benchmark.recommend import scaled_learning_rate
from flatout.engine.benchmark.rungs import SLOW
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import Kind, Planned, TrialResult
from flatout.engine.machine.environment import nvidia_gpu_count, usable_cores
from flatout.engine.parameters import SettingsError

NEED_GPU = frozenset({"compiled", "liger"})


def contenders(bench: Bench) -> list[str]:
    """`benchmark.contenders` that this machine can run."""
    gpu = nvidia_gpu_count() > 0
    found = [
        c for c in bench.options.contenders if gpu or NEED_GPU.isdisjoint(c.split("-"))
    ]
    if not found:
        raise SettingsError(
            f"benchmark.contenders: {', '.join(bench.options.contenders)} needs a GPU, "
            "and there is none; add flatout or trainer-best"
        )
    return list(found)


def peer_contests(bench: Bench) -> list[Planned]:
    """Whole trainings: with a free global batch each contender at every size of
    `batch_sizes`, and `conf/slow` at its own."""
    names = contenders(bench)
    if not bench.options.free_global_batch:
        return [_training(name, {}, name) for name in names]
    found = [
        _training(f"{name}, batch {size}", _at_batch(bench, size), name)
        for size in bench.options.batch_sizes
        for name in names
    ]
    return [*found, _training("conf/slow", SLOW, "flatout")]


def _training(label: str, changes: Changes, contender: str) -> Planned:
    options = {"contender": contender}
    return Planned("peer", changes, label, options, world_size=1)


def _at_batch(bench: Bench, size: int) -> Changes:
    """A global batch, and the learning rate that the rule makes of it."""
    train, rule = bench.settings.train, bench.options.learning_rate_rule
    growth = size / train.global_batch_size
    rate = scaled_learning_rate(train.peak_learning_rate, growth, rule)
    return {
        "train.global_batch_size": size,
        "train.learning_rate": rate,
        "train.learning_rate_at_batch": None,
    }


def peer_rows(bench: Bench) -> list[dict[str, Any]]:
    """Each contender with the time it took to a loss that all of them reached, and its
    rate over that of the fastest Trainer: their samples are as many, so that losses at
    the end compare quality."""
    trials = [t for t in bench.results if t.kind == "peer"]
    curves = {t.trial_id: bench.figures[t.trial_id].get("curve", []) for t in trials}
    target = target_loss([curve for curve in curves.values() if curve])
    others = [t for t in trials if bench.figures[t.trial_id].get("flags")]
    fastest = max(_rates(others, "peer"), default=None)
    return [
        {
            "name": trial.label,
            "status": trial.status,
            "note": trial.note,
            "samples_per_s": trial.samples_per_s,
            "over_best_peer": ratio(trial.samples_per_s, fastest),
            "reserved_memory_gib": trial.reserved_memory_gib,
            "target_validation_loss": target,
            "seconds_to_target": seconds_to(curves[trial.trial_id], target),
            **{
                name: bench.figures[trial.trial_id].get(name)
                for name in (
                    "first_step_s",
                    "validation_loss",
                    "validation_accuracy",
                    "flags",
                )
            },
        }
        for trial in trials
    ]


Curve = Sequence[Mapping[str, float]]
"""Points with `seconds` of training and `validation_loss`."""


def target_loss(curves: Sequence[Curve]) -> float | None:
    """The lowest loss that each of these curves reached."""
    best = [min(point["validation_loss"] for point in curve) for curve in curves]
    return max(best, default=None)


def seconds_to(curve: Curve, target: float | None) -> float | None:
    """Training seconds until the loss was `target` or less, between two evaluations
    by a straight line."""
    if target is None:
        return None
    before = None
    for point in curve:
        loss, seconds = point["validation_loss"], point["seconds"]
        if loss <= target:
            if before is None or before[0] == loss:
                return seconds
            share = (before[0] - target) / (before[0] - loss)
            return before[1] + share * (seconds - before[1])
        before = (loss, seconds)
    return None


COMPILED_WARMUP_STEPS = 250
"""Until the compiled Trainer has graphs for the lengths that occur."""
FLATOUT = "flatout"


def headline_contests(bench: Bench) -> Iterator[Planned]:
    """At the user's global batch; where it is free, at each of `batch_sizes` too.
    flatout also at the slow configuration's own."""
    settings, options = bench.settings, bench.options
    sizes = {settings.train.global_batch_size}
    if options.free_global_batch:
        sizes |= set(options.batch_sizes)
    names = contenders(bench)
    yield Planned("end_to_end", SLOW, "conf/slow", world_size=1)
    for size in sorted(sizes):
        for name in (name for name in names if name != FLATOUT):
            yield _trainer(name, size, bench.train_rows, bench.options.repeats)
    if FLATOUT in names:
        for size in sorted({SLOW["train.global_batch_size"], *sizes}):
            changes = {"train.global_batch_size": size}
            label = f"{FLATOUT}, batch {size}"
            yield Planned("end_to_end", changes, label, world_size=1)


def sorted_steps(size: int, rows: int) -> int:
    """Steps over which the Trainer sorts rows by length, longest first (transformers,
    `get_length_grouped_indices`): a window speaks for all rows where it is one such
    stretch. An epoch holds at least four of them."""
    return max(1, min(rows // (4 * size), 50))


def _trainer(name: str, size: int, rows: int, repeats: int) -> Planned:
    warmup = window = sorted_steps(size, rows)
    if "compiled" in name:
        epoch = math.ceil(rows / size)
        warmup = epoch * math.ceil(COMPILED_WARMUP_STEPS / epoch)
    most = warmup + (2 * repeats + 1) * window
    steps = {"train.max_steps": most, "train.epochs": 10_000}
    options = {
        "contender": name,
        "evaluations": 0,
        "warmup_steps": warmup,
        "window_steps": window,
        "repeats": repeats,
    }
    changes = {"train.global_batch_size": size, **steps}
    return Planned("peer", changes, f"{name}, batch {size}", options, world_size=1)


def headline_rows(bench: Bench) -> list[dict[str, Any]]:
    """Each line's rate, and its ratio to the slow one and to the Trainer's best."""
    trials = [t for t in bench.results if t.kind in ("end_to_end", "peer")]
    slow = next((t.samples_per_s for t in trials if t.label == "conf/slow"), None)
    trainer = max(_rates(trials, "peer"), default=None)
    peak = bench.peak_tflops_measured
    return [
        {
            "name": trial.label,
            "samples_per_s": trial.samples_per_s,
            "over_slow": ratio(trial.samples_per_s, slow),
            "over_trainer": ratio(trial.samples_per_s, trainer),
            "spread_pct": trial.samples_per_s_spread_pct,
            "tflops_per_s": trial.tflops_per_s,
            "mfu_pct": trial.mfu_pct,
            "share_of_measured_peak": ratio(trial.tflops_per_s, peak),
            "reserved_memory_gib": trial.reserved_memory_gib,
            "first_step_s": trial.first_step_s,
            "status": trial.status,
            "note": trial.note,
            "flags": bench.figures[trial.trial_id].get("flags"),
        }
        for trial in trials
    ]


def scaling_contests() -> list[Planned]:
    """1, 2, 4, ... devices at the same global batch; without GPUs, processes that
    share the cores."""
    most = nvidia_gpu_count() or min(2, usable_cores())
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= most]
    return [
        Planned("end_to_end", label=f"devices: {size}", world_size=size)
        for size in sizes
    ]


def _rates(trials: list[TrialResult], kind: Kind) -> list[float]:
    return [t.samples_per_s for t in trials if t.kind == kind and t.samples_per_s]
