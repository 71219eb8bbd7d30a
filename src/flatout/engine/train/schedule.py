"""The learning rate of a step: a pure function of its number."""

from __future__ import annotations

import math

from flatout.engine.parameters import TrainSettings


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Rate of `step` (from 0): linear warm-up, then the schedule, which falls no lower
    than `min_learning_rate_share` of the peak."""
    warmup = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup:
        return settings.peak_learning_rate * (step + 1) / warmup
    least = settings.min_learning_rate_share
    share = _share(settings, step, warmup, total_steps)
    return settings.peak_learning_rate * (least + (1 - least) * share)


def _share(settings: TrainSettings, step: int, warmup: int, total_steps: int) -> float:
    """1 at the peak, 0 behind the last step."""
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if settings.schedule == "wsd":
        decay = max(1, math.ceil(settings.decay_fraction * total_steps))
        return min(1.0, (total_steps - step) / decay)
    return 1 - done
