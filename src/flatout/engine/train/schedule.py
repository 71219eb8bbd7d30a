"""The learning rate of a step: a pure function of its number."""

from __future__ import annotations

import math

from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.parameters.own_parts import is_own, own_part

STEPS_TRIED = 1_000
"""Number of steps at which a custom schedule is tested before the first step."""


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Return the rate of `step` (from 0): linear warm-up, then the schedule, which
    falls no lower than `min_learning_rate_share` of the peak."""
    if is_own(settings.schedule):
        return settings.peak_learning_rate * own_share(settings, step, total_steps)
    warmup = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup:
        return settings.peak_learning_rate * (step + 1) / warmup
    least = settings.min_learning_rate_share
    share = _share(settings, step, warmup, total_steps)
    return settings.peak_learning_rate * (least + (1 - least) * share)


def own_share(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Return the share of the peak by a custom `train.schedule`, a path. Raises
    SettingsError for an invalid rate."""
    path = settings.schedule
    try:
        share = own_part(path, "train.schedule")(step, total_steps)
    except Exception as error:
        raise SettingsError(
            f"train.schedule: {path}({step}, {total_steps}) fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        found = float(share)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise SettingsError(
            f"train.schedule: {path}({step}, {total_steps}) gives {share!r}: it must "
            "be a share of train.learning_rate, a number of at least 0"
        )
    return found


def check_schedule(settings: TrainSettings, total_steps: int) -> None:
    """Test a custom schedule at steps all over a training. Raises SettingsError."""
    if is_own(settings.schedule):
        every = max(1, -(-total_steps // STEPS_TRIED))
        for step in sorted({*range(0, total_steps, every), max(0, total_steps - 1)}):
            own_share(settings, step, total_steps)


def _share(settings: TrainSettings, step: int, warmup: int, total_steps: int) -> float:
    """Return the share: 1 at the peak, 0 after the last step."""
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if settings.schedule == "wsd":
        decay = max(1, math.ceil(settings.decay_fraction * total_steps))
        return min(1.0, (total_steps - step) / decay)
    return 1 - done
