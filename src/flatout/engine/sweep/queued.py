"""The combinations to try, as trials of an Optuna study.

Each combination has a number called its place, counted from 1. For a grid, the place is
the position of the combination in the grid. For tpe, it is the number of the trial for
which Optuna first drew the combination. A place can have several Optuna trials, because
interrupted trials are queued again. Trials that have ended are the rows of
sweep_trials.csv.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from flatout.engine.parameters import SweepSettings
from flatout.engine.sweep.space import Changes, combinations

PLACE, ANSWER = "place", "answer"
"""Names of user attributes of an Optuna trial."""
SETTLED = ("ok", "oom", "pruned")
"""Final statuses. Trials with these statuses are never tried again."""


def place_of(trial: Trial | FrozenTrial) -> int:
    """Return the stored place of a trial, or its number plus 1 if the trial was newly
    drawn and has no stored place."""
    place: int = trial.user_attrs.get(PLACE, trial.number + 1)
    return place


def ended(study: Study) -> list[FrozenTrial]:
    """Return the trials that have reported a result."""
    return [t for t in study.get_trials(deepcopy=False) if ANSWER in t.user_attrs]


def running(study: Study) -> list[FrozenTrial]:
    return list(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))


def queue_again(study: Study, options: SweepSettings) -> None:
    """Queue a trial for each place that has no final result and no waiting or running
    trial. For a new study with the grid sampler, this queues the whole grid."""
    trials = study.get_trials(deepcopy=False)
    grid = combinations(options) if options.sampler == "grid" else []
    wanted = dict(enumerate(grid, 1))
    wanted |= {place_of(t): t.params for t in trials if PLACE in t.user_attrs}
    for place in sorted(wanted.keys() - {place_of(t) for t in trials if _is_live(t)}):
        _enqueue(study, wanted[place], place)


def requeue(study: Study, trial: Trial | FrozenTrial) -> None:
    """Queue a trial again. The next free device resumes it from its last checkpoint."""
    if PLACE in trial.user_attrs:
        _enqueue(study, trial.params, place_of(trial))


def fail_running(study: Study) -> None:
    """Mark all running trials as failed. Call this only if no other process uses the
    storage, because the trials must have been interrupted."""
    for trial in running(study):
        study.tell(trial.number, state=TrialState.FAIL)


def is_wanted(study: Study, options: SweepSettings, trial: Trial) -> bool:
    """Return whether the sweep needs `trial`, and store the place of a new tpe trial. A
    trial is not needed if Optuna drew it although enough trials had been started."""
    if PLACE in trial.user_attrs:
        return True
    others = _places(study) - {place_of(trial)}
    earlier = [place for place in others if place < place_of(trial)]
    if options.sampler == "grid" or len(earlier) >= options.n_trials:
        return False
    trial.set_user_attr(PLACE, place_of(trial))
    return True


def has_remaining_trials(study: Study, options: SweepSettings) -> bool:
    """Return whether there are queued trials, or trials still to be drawn by tpe."""
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    owed = options.sampler != "grid" and len(_places(study)) < options.n_trials
    return bool(waiting) or owed


def _places(study: Study) -> set[int]:
    """Return the places of trials that are waiting or running, or have a result."""
    return {
        place_of(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.FAIL or ANSWER in trial.user_attrs
    }


def _is_live(trial: FrozenTrial) -> bool:
    """Return whether a trial is waiting or running, or has a final result."""
    status = trial.user_attrs.get(ANSWER, {}).get("status")
    return trial.state != TrialState.FAIL or status in SETTLED


def _enqueue(study: Study, changes: Changes, place: int) -> None:
    study.enqueue_trial(dict(changes), user_attrs={PLACE: place})


FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s")
FACTS = ("steps", "train_wall_s", "device")

Row = dict[str, Any]


def best_trial_by_place(found: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """Return the newest trial for each place, successful ones before others."""

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
    """Return `value`, or None if it is not finite, which databases reject in JSON."""
    return value if value is None or math.isfinite(value) else None


def shown(values: Mapping[str, Any]) -> str:
    """Return `values` as text, e.g. `train.learning_rate=0.001`. Values that are None
    are left out."""
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    )
