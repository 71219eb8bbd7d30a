"""The search space of a sweep: check the swept settings, and list their values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

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
from flatout.engine.tasks import figures_of, higher_is_better, task_class

if TYPE_CHECKING:
    from optuna.trial import Trial

Changes = Mapping[str, SweptValue]
"""The value of each swept setting, by path."""

SWEPT = ("train.", "model.", "runtime.")
SEED, FOLD = "runtime.seed", "fold"
"""Axes of the grid that are not settings to compare. Each combination of settings is
trained once per seed or fold."""
FIXED = ("train.distributed", "train.resume")
"""Settings that cannot be swept, because sweep.devices_per_trial sets the number of
devices and trials resume automatically."""

FILES = (".db", ".sqlite", ".sqlite3")


def objective(settings: Settings) -> tuple[str, bool]:
    """Return the metric by which trials are compared, and whether higher is better.
    Raises SettingsError if the task does not have this metric."""
    name = settings.sweep.choose_by
    name = name or f"validation_{settings.train.metric or 'loss'}"
    task = task_class(settings.model.task)
    known = [f"validation_{figure}" for figure in figures_of(settings.model, task)]
    if name not in known and settings.train.compute_metrics is None:
        near = near_or_all(name, known, "")
        raise SettingsError(f"sweep.choose_by: the task has no metric {name}; {near}")
    return name, higher_is_better(settings, task, name.removeprefix("validation_"))


def repeated(settings: Settings, folds: int | None = None) -> Settings:
    """Return `settings` with the seeds (`sweep.seeds`) or the numbers of the folds
    added to the grid. With folds, a grid that equals the default is dropped. Raises
    SettingsError if seeds and folds are combined, or if either is combined with a
    pruner or with a sampler other than the grid."""
    sweep, grid = settings.sweep, dict(settings.sweep.grid)
    if not (folds or sweep.seeds):
        return settings
    if sweep.sampler != "grid" or sweep.pruner != "none" or (folds and sweep.seeds):
        raise SettingsError(
            "sweep.seeds and split.folds compare whole trainings of a grid: set "
            "sweep.sampler=grid, sweep.pruner=none, and one of the two"
        )
    if folds:
        grid = {} if grid == SweepSettings().grid else grid
        grid[FOLD] = list(range(1, folds + 1))
    elif SEED in grid:
        raise SettingsError(f"sweep.seeds sets {SEED}: remove it from sweep.grid")
    else:
        grid[SEED] = [settings.runtime.seed + n for n in range(sweep.seeds or 0)]
    return settings.changed({"sweep.grid": grid})


def check_sweep(settings: Settings, folds: int | None = None) -> None:
    """Raise SettingsError if a swept setting or value, the metric or the storage is
    invalid, or if `repeated` rejects the seeds or folds."""
    objective(settings)
    repeated(settings, folds)
    check_place(settings.sweep.storage)
    options = settings.sweep
    listed: dict[str, list[SweptValue]] = dict(options.grid)
    listed |= {path: [r.low, r.high] for path, r in options.ranges.items()}
    for path, values in listed.items():
        for value in values:
            _check_value(settings, path, value)


def check_place(place: str) -> None:
    """Raise SettingsError if `place` is neither a database file nor the URL of a known
    database. The message omits `place`, which may contain a password."""
    kind, separator, _ = place.partition("://")
    if kind.split("+")[0] == "postgres" or not (separator or place.endswith(FILES)):
        raise SettingsError(
            "sweep.storage must be a file that ends in .db, or a database: "
            "postgresql://user@host/name, mysql+pymysql://user@host/name"
        )


def _check_value(settings: Settings, path: str, value: SweptValue) -> None:
    if path.startswith(FIXED):
        raise SettingsError(
            f"sweep: {path} cannot be swept, because sweep.devices_per_trial sets the "
            "devices of a trial, and trials resume automatically: remove it from "
            "sweep.grid"
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
            "runtime can, because the token rows are made before. Remove it from "
            "sweep.grid"
        )


def combinations(options: SweepSettings) -> list[Changes]:
    """Return the distinct combinations of the grid. The last setting varies fastest."""
    axes = {path: dict.fromkeys(values) for path, values in options.grid.items()}
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def suggested(trial: Trial, options: SweepSettings) -> Changes:
    """Return the values that Optuna suggests for `trial`, by path."""
    lists = {p: trial.suggest_categorical(p, v) for p, v in options.grid.items()}
    return {**lists, **{p: _drawn(trial, p, r) for p, r in options.ranges.items()}}


def _drawn(trial: Trial, path: str, bounds: SweepRange) -> int | float:
    if isinstance(bounds.low, int) and isinstance(bounds.high, int):
        return int(trial.suggest_int(path, bounds.low, bounds.high, log=bounds.log))
    return float(trial.suggest_float(path, bounds.low, bounds.high, log=bounds.log))
