"""Which settings next: every combination of the lists, or what optuna suggests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any, Protocol

from flatout.engine.bench.trial_spec import with_changes
from flatout.engine.model_keys import check_model_keys
from flatout.engine.settings import (
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


@dataclass(frozen=True)
class Suggestion:
    changes: Changes
    handle: Any = None
    """What the sampler knows it by."""


class Sampler(Protocol):
    """Not safe for threads: callers take turns."""

    total: int
    """Suggestions in all."""

    def ask(self) -> Suggestion | None:
        """What to try next; None where nothing is left."""

    def tell(self, suggestion: Suggestion, value: float | None) -> None:
        """What it gave, None for a training that failed."""


def open_sampler(settings: Settings, past: Sequence[Changes]) -> Sampler:
    """`past`: what a stopped sweep has begun, in order. Raises SettingsError."""
    check_sweep(settings)
    options = settings.sweep
    if options.sampler == "grid":
        return Grid(options)
    return Optuna(options, settings.runtime.seed, past)


def check_sweep(settings: Settings) -> None:
    """Raises SettingsError for a setting that is none, a value that it cannot have,
    and for optuna where it is not installed."""
    options = settings.sweep
    if options.sampler == "optuna" and find_spec("optuna") is None:
        raise SettingsError(
            "sweep.sampler: optuna is not installed: pip install 'flatout[sweep]', or "
            "set sweep.sampler: grid"
        )
    for path, values in _values(options).items():
        for value in values:
            _check_value(settings, path, value)


def _values(options: SweepSettings) -> dict[str, Sequence[SweptValue]]:
    """All listed values, and the bounds of the ranges."""
    bounds = {path: (r.low, r.high) for path, r in options.ranges.items()}
    return {**options.grid, **bounds}


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


class Grid:
    """Every combination; the last setting changes fastest."""

    def __init__(self, options: SweepSettings) -> None:
        axes = options.grid
        self._left = [
            dict(zip(axes, values, strict=True)) for values in product(*axes.values())
        ]
        self.total = len(self._left)

    def ask(self) -> Suggestion | None:
        return Suggestion(self._left.pop(0)) if self._left else None

    def tell(self, suggestion: Suggestion, value: float | None) -> None:
        """A grid learns nothing."""


class Optuna:
    """A tree-structured Parzen estimator (Bergstra et al. 2011).

    What a stopped sweep has begun is suggested again first: finished trials are known
    to the caller, which tells them at once.
    """

    def __init__(
        self, options: SweepSettings, seed: int, past: Sequence[Changes]
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = _distributions(options)
        self._past = [changes for changes in past if _fits(options, changes)]
        self.total, self._asked = options.n_trials, 0
        maximize = options.choose_by == "validation_accuracy"
        self._study = optuna.create_study(
            # Another seed, or the draws of before would come again.
            sampler=optuna.samplers.TPESampler(seed=seed + len(self._past)),
            direction="maximize" if maximize else "minimize",
        )

    def ask(self) -> Suggestion | None:
        if self._asked == self.total:
            return None
        self._asked += 1
        if self._past:
            return Suggestion(self._past.pop(0))
        trial = self._study.ask(self._space)
        return Suggestion(dict(trial.params), trial)

    def tell(self, suggestion: Suggestion, value: float | None) -> None:
        import optuna

        state = optuna.trial.TrialState
        ended = state.FAIL if value is None else state.COMPLETE
        if suggestion.handle is not None:
            self._study.tell(suggestion.handle, value, state=ended)
            return
        self._study.add_trial(
            optuna.trial.create_trial(
                params=dict(suggestion.changes),
                distributions=self._space,
                value=value,
                state=ended,
            )
        )


def _distributions(options: SweepSettings) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution

    lists = {path: CategoricalDistribution(v) for path, v in options.grid.items()}
    return {**lists, **{path: _bounded(r) for path, r in options.ranges.items()}}


def _bounded(bounds: SweepRange) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    whole = isinstance(bounds.low, int) and isinstance(bounds.high, int)
    kind = IntDistribution if whole else FloatDistribution
    return kind(bounds.low, bounds.high, log=bounds.log)


def _fits(options: SweepSettings, changes: Changes) -> bool:
    """Whether these settings, and values, could be suggested now."""
    if set(changes) != {*options.grid, *options.ranges}:
        return False
    for path, value in changes.items():
        bounds = options.ranges.get(path)
        if bounds is None and value not in options.grid[path]:
            return False
        if bounds is not None and not (
            isinstance(value, (int, float)) and bounds.low <= value <= bounds.high
        ):
            return False
    return True
