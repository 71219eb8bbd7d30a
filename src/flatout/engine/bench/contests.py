"""Who trains against whom, in the modes that compare with the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterable
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
