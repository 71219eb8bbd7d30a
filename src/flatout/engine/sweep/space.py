"""What may be tried: settings by path, their values, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.models.model_keys import check_model_keys
from flatout.engine.parameters import (
    Settings,
    SettingsError,
    SweepRange,
    SweepSettings,
    SweptValue,
    near_or_all,
)
from flatout.engine.sweep.storage import check_place
from flatout.engine.tasks import task_class

Changes = Mapping[str, SweptValue]
"""Value of each swept setting, by path."""

SWEPT = ("train.", "model.", "runtime.")
FIXED = ("train.distributed", "train.resume")
"""sweep.devices_per_trial sets a trial's devices; it goes on where it stopped."""
LARGEST_EXACT = 2**53
"""Storages keep every number as a float."""


def objective(settings: Settings) -> tuple[str, bool]:
    """The figure of a report that decides, and whether higher is better. Raises
    SettingsError for one that the task has not."""
    name = settings.sweep.choose_by
    name = name or f"validation_{settings.train.metric or 'loss'}"
    figures = task_class(settings.model.task).figures
    known = {f"validation_{figure}": higher for figure, higher in figures.items()}
    if name not in known:
        near = near_or_all(name, known, "")
        raise SettingsError(f"sweep.choose_by: {name} is no figure of the task; {near}")
    return name, known[name]


def check_sweep(settings: Settings) -> None:
    """Raises SettingsError for a setting that is none, or a value that it cannot
    have, and for a storage that cannot be meant."""
    objective(settings)
    check_place(settings.sweep.storage)
    options = settings.sweep
    listed: dict[str, list[SweptValue]] = dict(options.grid)
    listed |= {path: [r.low, r.high] for path, r in options.ranges.items()}
    for path, values in listed.items():
        for value in values:
            _check_value(settings, path, value)


def _check_value(settings: Settings, path: str, value: SweptValue) -> None:
    if path.startswith(FIXED):
        raise SettingsError(
            f"sweep: {path} cannot be swept: sweep.devices_per_trial says how many "
            "devices a trial has, and it resumes by itself; take it out of sweep.grid"
        )
    try:
        changed = with_changes(settings, {path: value})
        if path.startswith("model."):
            check_model_keys(changed.model)
    except SettingsError as error:
        raise SettingsError(f"In the settings that sweep names, {error}") from None
    if not path.startswith(SWEPT):
        raise SettingsError(
            f"sweep: {path} cannot be swept: only settings under train, model and "
            "runtime can, because the token rows are made before; take it out of "
            "sweep.grid"
        )


def combinations(options: SweepSettings) -> list[Changes]:
    """Each once; the last setting changes fastest."""
    axes = {path: dict.fromkeys(values) for path, values in options.grid.items()}
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def key_of(changes: Changes) -> str:
    """The same for the same values, whatever their order."""
    return json.dumps(dict(changes), sort_keys=True)


def distributions(options: SweepSettings) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution

    kind = _named if options.sampler == "grid" else CategoricalDistribution
    lists = {path: kind(values) for path, values in options.grid.items()}
    return {**lists, **{path: _bounded(r) for path, r in options.ranges.items()}}


def _named(values: Sequence[SweptValue]) -> Any:
    """Of a grid, whose combinations are queued by name: numbers by their bounds, as the
    list of all values would stand in every trial and be parsed with each."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if all(type(value) is float for value in values):
        return FloatDistribution(min(values), max(values))
    if all(type(value) is int and abs(value) <= LARGEST_EXACT for value in values):
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(values)


def _bounded(bounds: SweepRange) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    whole = isinstance(bounds.low, int) and isinstance(bounds.high, int)
    kind = IntDistribution if whole else FloatDistribution
    return kind(bounds.low, bounds.high, log=bounds.log)
