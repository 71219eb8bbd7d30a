"""Which settings next: every combination of the lists, or what optuna suggests."""

from __future__ import annotations

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
)

Changes = Mapping[str, SweptValue]
"""Value of each swept setting, by path."""

SWEPT = ("train.", "model.", "runtime.")
FIXED = ("train.distributed", "train.resume")
"""A trial is one process on one device, and goes on where it stopped."""


def check_sweep(settings: Settings) -> None:
    """Raises SettingsError for a setting that is none, or a value that it cannot
    have."""
    options = settings.sweep
    listed: dict[str, list[SweptValue]] = dict(options.grid)
    listed |= {path: [r.low, r.high] for path, r in options.ranges.items()}
    for path, values in listed.items():
        for value in values:
            _check_value(settings, path, value)


def _check_value(settings: Settings, path: str, value: SweptValue) -> None:
    if path.startswith(FIXED):
        raise SettingsError(
            f"sweep: {path} cannot be swept: a trial runs on one device and resumes "
            "by itself; take it out of sweep.grid"
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


class Sampler:
    """An optuna study. It is first asked for every combination of a grid; of sampler
    optuna for what a stopped sweep has begun (`past`, in order), then for what a
    tree-structured Parzen estimator suggests (Bergstra et al. 2011).

    Not safe for threads: callers take turns.
    """

    def __init__(
        self, options: SweepSettings, seed: int, past: Sequence[Changes]
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        listed = options.sampler == "grid"
        first = combinations(options) if listed else _possible(options, past)
        self.total = len(first) if listed else options.n_trials
        self._left = self.total
        self._space = _distributions(options)
        maximize = options.choose_by == "validation_accuracy"
        self._study = optuna.create_study(
            # Another seed, or the draws of before would come again.
            sampler=optuna.samplers.TPESampler(seed=seed + len(first)),
            direction="maximize" if maximize else "minimize",
        )
        for changes in first:
            self._study.enqueue_trial(dict(changes))

    def ask(self) -> Any:
        """The next optuna.Trial; None where nothing is left."""
        if not self._left:
            return None
        self._left -= 1
        return self._study.ask(self._space)

    def tell(self, trial: Any, value: float | None) -> None:
        """What it gave, None for a training that failed."""
        from optuna.trial import TrialState

        failed = TrialState.FAIL if value is None else None
        self._study.tell(trial, value, state=failed)


def combinations(options: SweepSettings) -> list[Changes]:
    """The last setting changes fastest."""
    axes = options.grid
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _distributions(options: SweepSettings) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution

    lists = {path: CategoricalDistribution(v) for path, v in options.grid.items()}
    return {**lists, **{path: _bounded(r) for path, r in options.ranges.items()}}


def _bounded(bounds: SweepRange) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    whole = isinstance(bounds.low, int) and isinstance(bounds.high, int)
    kind = IntDistribution if whole else FloatDistribution
    return kind(bounds.low, bounds.high, log=bounds.log)


def _possible(options: SweepSettings, past: Sequence[Changes]) -> list[Changes]:
    """Of `past`, what could be suggested now."""
    paths = {*options.grid, *options.ranges}
    return [
        changes
        for changes in past
        if set(changes) == paths
        and all(_holds(options, path, value) for path, value in changes.items())
    ]


def _holds(options: SweepSettings, path: str, value: SweptValue) -> bool:
    bounds = options.ranges.get(path)
    if bounds is None:
        return value in options.grid[path]
    number = isinstance(value, (int, float))
    return number and bounds.low <= value <= bounds.high  # type: ignore[operator]
