"""Rows of sweep_trials.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from optuna.trial import FrozenTrial

from flatout.engine.sweep.queued import ANSWER, place_of

FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s")
FACTS = ("steps", "train_wall_s", "device")

Row = dict[str, Any]


def best_trial_by_place(found: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """Return one trial per place: of several, a successful one, then the newest."""

    def worth(trial: FrozenTrial) -> tuple[bool, int]:
        return trial.user_attrs[ANSWER]["status"] == "ok", trial.number

    return {place_of(trial): trial for trial in sorted(found, key=worth)}


def row(trial: FrozenTrial, place: int) -> Row:
    begun = trial.datetime_start
    return {
        "trial_id": f"{place:03d}",
        **trial.params,
        **trial.user_attrs[ANSWER],
        "begun_s": begun.timestamp() if begun else None,
    }


def number(value: Any) -> Any:
    """Return the number; storages store JSON, which has no NaN."""
    return value if value is None or math.isfinite(value) else None


def shown(values: Mapping[str, Any]) -> str:
    """Return `train.learning_rate=0.001, train.global_batch_size=16`, without None."""
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    )
