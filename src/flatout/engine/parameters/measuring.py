"""Parameters of pipelines that start many runs to measure speed or compare results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    PATH,
    Auto,
    Count,
    CountOrZero,
    Precision,
    SettingsModel,
    Strategy,
    parameter,
)

BenchmarkMode = Literal["tune", "grid", "ladder"]


def _split_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.split()
    return [value] if isinstance(value, int) else value


LISTED = BeforeValidator(_split_text)
"""Validator that also accepts a list as a string such as `8 16 32`, because a comma in
--params ends the parameter."""


class SlowHabits(SettingsModel):
    """Bad habits of slow training loops, for measurements with conf/slow and the
    ladder."""

    synchronize_every_step: bool = parameter(False, EXECUTION)
    """Read the loss on the host after every step (only to measure slow loops)."""
    history: Literal["list", "dataframe"] = parameter("list", EXECUTION, MACHINE)
    """`dataframe` appends a row to a DataFrame every step (only to measure slow
    loops)."""
    empty_cache_every: int | None = parameter(None, EXECUTION, MACHINE, ge=1)
    """Steps between calls of torch.cuda.empty_cache (only to measure slow loops)."""


class BenchmarkSettings(SettingsModel):
    """Measurements and time limits of `kedro run --pipelines=benchmark`."""

    mode: BenchmarkMode = "tune"
    """Kind of measurement (see docs/pipelines/benchmark.md)."""
    batch_sizes: Annotated[list[Count], LISTED] = Field([8, 16, 32], min_length=1)
    """Grid: global batch sizes in samples."""
    num_workers: Annotated[list[CountOrZero], LISTED] = Field([0, 1], min_length=1)
    """Grid: numbers of loader workers."""
    precisions: Annotated[list[Precision | Auto], LISTED] = Field(
        ["auto"], min_length=1
    )
    """Grid: compute dtypes."""
    strategies: Annotated[list[Strategy], LISTED] = Field(
        ["grouped", "packed"], min_length=1
    )
    """Grid: values of `train.batching`."""
    prefetch_factors: Annotated[list[Count], LISTED] = []
    """Grid: values of `train.loader.prefetch_factor` (if empty, the configured one)."""
    pin_memory: Annotated[list[bool], LISTED] = []
    """Grid: values of `train.loader.pin_memory` (if empty, the configured one)."""
    token_budgets: Annotated[list[Count], LISTED] = []
    """Grid: values of `train.token_budget`. If empty, `auto`."""
    steps_per_trial: int = Field(20, ge=2)
    """Number of optimizer steps in a timed window."""
    warmup_steps: int = Field(3, ge=1)
    """Number of steps before the first window. These steps are not measured."""
    repeats: int = Field(3, ge=1)
    """Number of windows per trial, or of pairs of windows if two trials are compared.
    The median window or ratio is the result."""
    min_window_s: float = Field(1.0, ge=0)
    """Minimum duration of a window in seconds. Shorter windows repeat their steps."""
    max_window_s: float = Field(2.5, gt=0)
    """Maximum duration of a window in seconds. A window has at least 2 steps."""
    tune_minutes: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Minutes after which `tune` mode stops exploring and confirms its results. `auto`
    is 5 without a GPU. With a GPU, it is 15, because each trial compiles the model."""
    trial_timeout_s: float = Field(300, gt=0)
    """Maximum duration of a trial in seconds. A longer trial is stopped."""
    memory_headroom: float = Field(0.1, ge=0, lt=1)
    """Fraction of the device's memory that a recommended trial must leave free."""
    free_global_batch: bool = False
    """Let `grid` mode recommend any of `batch_sizes`, not just the configured size."""
    learning_rate_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate is scaled if the global batch size changes."""
    profile: bool = False
    """Record torch.profiler traces of the best trial."""
    resume: bool = True
    """Continue a stopped search instead of repeating its trials."""
    folder: str = parameter("data/08_reporting/benchmark_logs", PATH)
    """Folder for the specification, log and result of each trial, by mode."""


MAX_COMBINATIONS = 10_000

SweptValue = bool | int | float | str


class SweepRange(SettingsModel):
    """Values between two inclusive bounds. If both bounds are integers, all values are
    integers."""

    low: int | float
    high: int | float
    log: bool = False
    """Draw values uniformly on a logarithmic scale."""

    @model_validator(mode="after")
    def _ordered(self) -> SweepRange:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError("log needs a low above 0")
        return self


class SweepSettings(SettingsModel):
    """Training with many combinations of settings, given by paths such as
    train.epochs."""

    storage: str = parameter("data/08_reporting/sweep.db", PATH)
    """Storage of the queued trials: a SQLite file for a single command, or a database
    server for several machines, such as `postgresql://user@host/name`."""
    study: str = "sweep"
    """Name of the study in the storage. Machines that share a sweep use the same
    name."""
    sampler: Literal["grid", "tpe"] = "grid"
    """`grid` tries every combination; with `tpe`, Optuna chooses the combinations."""
    pruner: Literal["none", "hyperband", "median"] = "none"
    """Optuna pruner, which ends a trial whose metrics are worse than those of other
    trials."""
    grid: dict[str, list[SweptValue]] = {
        "train.learning_rate": [3e-4, 1e-3],
        "train.global_batch_size": [16, 32],
    }
    """Values of each setting. `grid` tries all combinations, and `tpe` tries some of
    them."""
    ranges: dict[str, SweepRange] = {}
    """`tpe` sampler: bounds of each setting, instead of a list of values."""
    seeds: int | None = Field(None, ge=2)
    """Number of seeds (preferably 3 or more) for each combination in the grid. All
    seeds use the same rows, and a table compares the combinations. If null, each
    combination is trained once."""
    n_trials: int = Field(20, ge=1)
    """Number of trials of the `tpe` sampler, over all machines and restarts."""
    choose_by: str | None = None
    """Report metric that ranks the trials, for example `validation_accuracy`. If null,
    it is `train.metric` on the validation split."""
    devices_per_trial: int = Field(1, ge=1)
    """GPUs per trial, each with one rank. Without a GPU, the number of ranks per
    trial."""
    heartbeat_s: float = Field(30.0, gt=0)
    """Seconds between heartbeats, which show in the storage that a trial is running.
    After three missed heartbeats, another machine takes over the trial."""
    trial_timeout_s: float | None = Field(None, gt=0)
    """Maximum duration of a trial in seconds. A longer trial is stopped; the others
    continue."""
    folder: str = parameter("data/08_reporting/sweep_logs", PATH)
    """Folder with a subfolder per trial for its request, log, checkpoints and
    result."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _earlier_name(cls, name: Any) -> Any:
        return "tpe" if name == "optuna" else name

    @field_validator("grid", "ranges", mode="before")
    @classmethod
    def _by_path(cls, value: Any) -> Any:
        """Convert nested groups of --params to dotted names, and drop null values."""
        if not isinstance(value, Mapping):
            return value
        # The null may come from nested groups in --params, even if the values of the
        # same setting come from conf/base, which uses dotted names.
        swept = list(_swept(value))
        dropped = {path for path, values in swept if values is None}
        return {path: values for path, values in swept if path not in dropped}

    @model_validator(mode="after")
    def _something_to_try(self) -> SweepSettings:
        if self.ranges and self.sampler == "grid":
            raise ValueError(
                "ranges need sampler tpe; sampler grid uses lists in sweep.grid"
            )
        if not self.grid and not self.ranges:
            raise ValueError("grid and ranges are empty: name a setting in grid")
        empty = [path for path, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"no values to try for {', '.join(empty)}")
        count = prod(map(len, self.grid.values()))
        if self.sampler == "grid" and count > MAX_COMBINATIONS:
            raise ValueError(
                f"the grid has {count:,} combinations, more than {MAX_COMBINATIONS:,}: "
                "name fewer values, or let sampler tpe choose n_trials of them"
            )
        return self


def _swept(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and not {"low", "high"} & {*value}:
            yield from _swept(value, f"{path}.")
        elif isinstance(value, str):
            yield path, [_number_or_text(part) for part in value.split()]
        elif value is None or isinstance(value, (list, Mapping)):
            yield path, value
        else:
            yield path, [value]


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
