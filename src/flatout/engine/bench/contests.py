"""Who trains against whom, in the modes that compare with the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.budgets import Changes
from flatout.engine.bench.recommend import scaled_learning_rate
from flatout.engine.bench.rungs import SLOW
from flatout.engine.bench.trial_spec import Kind
from flatout.engine.environment import nvidia_gpu_count
from flatout.engine.settings import SettingsError


@dataclass(frozen=True)
class Contest:
    """A trial of one device to set beside others."""

    label: str
    kind: Kind
    changes: Changes
    options: dict[str, Any] = field(default_factory=dict)


def compete(bench: Bench, contests: Iterable[Contest]) -> None:
    """One after the other."""
    for one in contests:
        bench.run(
            one.kind, one.changes, label=one.label, options=one.options, world_size=1
        )


def contenders(bench: Bench) -> list[str]:
    """`benchmark.contenders` that this machine can run."""
    gpu = nvidia_gpu_count() > 0
    found = [c for c in bench.options.contenders if gpu or "compiled" not in c]
    if not found:
        raise SettingsError(
            f"benchmark.contenders: {', '.join(bench.options.contenders)} needs a GPU, "
            "and there is none; add flatout or trainer-best"
        )
    return list(found)


def peer_contests(bench: Bench) -> list[Contest]:
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


def _training(label: str, changes: Changes, contender: str) -> Contest:
    return Contest(label, "peer", changes, {"contender": contender})


def _at_batch(bench: Bench, size: int) -> Changes:
    """A global batch, and the learning rate that the rule makes of it."""
    train, rule = bench.settings.train, bench.options.learning_rate_rule
    growth = size / train.global_batch_size
    rate = scaled_learning_rate(train.learning_rate, growth, rule)
    return {"train.global_batch_size": size, "train.learning_rate": rate}


def peer_rows(bench: Bench) -> list[dict[str, Any]]:
    """Each contender with the time it took to a loss that all of them reached."""
    trials = [t for t in bench.results if t.kind == "peer"]
    curves = {t.trial_id: bench.figures[t.trial_id].get("curve", []) for t in trials}
    target = target_loss([curve for curve in curves.values() if curve])
    return [
        {
            "name": trial.label,
            "status": trial.status,
            "note": trial.note,
            "samples_per_s": trial.samples_per_s,
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
