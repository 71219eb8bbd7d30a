"""Parameters of many trainings, to measure speed or to compare results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
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
"""Accepts `8 16 32`, one text: a comma in --params begins the next parameter."""


class SlowHabits(SettingsModel):
    """Habits of slow loops at each step, for comparisons: conf/slow and the ladder."""

    synchronize_every_step: bool = parameter(False, EXECUTION)
    """Read the loss on the host after every step (only to measure slow loops)."""
    history: Literal["list", "dataframe"] = parameter("list", EXECUTION, MACHINE)
    """`dataframe` joins a table at every step (only to measure slow loops)."""
    empty_cache_every: int | None = parameter(None, EXECUTION, MACHINE, ge=1)
    """Steps between two calls of empty_cache (only to measure slow loops)."""


class BenchmarkSettings(SettingsModel):
    """Measurements of `kedro run --pipelines=benchmark`, and their duration."""

    mode: BenchmarkMode = "tune"
    """Kind of measurement; see docs/pipelines/benchmark.md."""
    batch_sizes: Annotated[list[Count], LISTED] = Field([8, 16, 32], min_length=1)
    """Global batches of the grid, in samples."""
    num_workers: Annotated[list[CountOrZero], LISTED] = Field([0, 1], min_length=1)
    """Numbers of loader processes of the grid."""
    precisions: Annotated[list[Precision | Auto], LISTED] = Field(
        ["auto"], min_length=1
    )
    """Compute types of the grid."""
    strategies: Annotated[list[Strategy], LISTED] = Field(
        ["grouped", "packed"], min_length=1
    )
    """Values of `train.batching` of the grid."""
    prefetch_factors: Annotated[list[Count], LISTED] = []
    """Batches ahead per loader process, of the grid. Empty: as configured."""
    pin_memory: Annotated[list[bool], LISTED] = []
    """Page-locked host memory on and off, in the grid on a machine with a GPU. Empty:
    as configured."""
    token_budgets: Annotated[list[Count], LISTED] = []
    """Tokens of a micro-batch. Empty: values around one global batch."""
    steps_per_trial: int = Field(20, ge=2)
    """Optimizer steps of a timed window."""
    warmup_steps: int = Field(3, ge=1)
    """Steps before the first window; not counted."""
    repeats: int = Field(3, ge=1)
    """Windows of `steps_per_trial` steps, or alternations of two; the median counts."""
    min_window_s: float = Field(1.0, ge=0)
    """Minimum duration of a window; shorter ones repeat their steps."""
    max_window_s: float = Field(2.5, gt=0)
    """Maximum duration of a window: it has fewer steps if they are slow (2 or more)."""
    tune_minutes: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Minutes after which mode tune stops exploring and confirms its results. auto: 5,
    and 15 with a GPU, because each trial compiles on it."""
    max_minutes: float | None = Field(None, gt=0)
    """Minutes after which no trial begins, in any mode; the next run continues."""
    trial_timeout_s: float = Field(300, gt=0)
    """Maximum duration of a trial; a longer one is ended."""
    memory_headroom: float = Field(0.1, ge=0, lt=1)
    """Share of the device's memory that a recommendation leaves free."""
    free_global_batch: bool = False
    """Let mode grid recommend any of `batch_sizes`, not only the configured one."""
    learning_rate_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    """Rule by which the learning rate follows a changed global batch."""
    profile: bool = False
    """Record traces of torch.profiler for the best trial."""
    resume: bool = True
    """Continue with the trials of a stopped search."""
    folder: str = "data/08_reporting/benchmark_logs"
    """Folder of the results: request, log and answer of each trial, by mode."""


MAX_COMBINATIONS = 10_000

SweptValue = bool | int | float | str


class SweepRange(SettingsModel):
    """Values between two bounds, both included; whole numbers if both bounds are."""

    low: int | float
    high: int | float
    log: bool = False
    """Draw evenly on a logarithmic scale."""

    @model_validator(mode="after")
    def _ordered(self) -> SweepRange:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError("log needs a low above 0")
        return self


class SweepSettings(SettingsModel):
    """Trainings that differ in some settings, named by path (train.learning_rate)."""

    storage: str = "data/08_reporting/sweep.db"
    """Queue of the trials: a SQLite file for one command, or the database of a server
    for several machines: `postgresql://user@host/name`."""
    study: str = "sweep"
    """Name of the queue in its storage: the same on all machines that work on it."""
    sampler: Literal["grid", "tpe"] = "grid"
    """grid: every combination. tpe: Optuna's choice of them."""
    pruner: Literal["none", "hyperband", "median"] = "none"
    """Rule of Optuna that ends a training with worse evaluations than others."""
    grid: dict[str, list[SweptValue]] = {
        "train.learning_rate": [3e-4, 1e-3],
        "train.global_batch_size": [16, 32],
    }
    """Values of each setting: all combinations, or those that tpe chooses."""
    ranges: dict[str, SweepRange] = {}
    """sampler tpe: bounds instead of a list."""
    seeds: int | None = Field(None, ge=2)
    """Number of seeds with which each setting of the grid is trained on the same rows;
    3 or more are recommended. A table compares the settings. null: one each."""
    n_trials: int = Field(20, ge=1)
    """Number of trainings of sampler tpe, over all machines and restarts."""
    choose_by: str | None = None
    """Figure of the report that decides, for example `validation_accuracy`. null:
    `train.metric` of the validation split."""
    devices_per_trial: int = Field(1, ge=1)
    """GPUs per trial, with one rank on each. Without a GPU: number of ranks."""
    heartbeat_s: float = Field(30.0, gt=0)
    """Seconds between messages to the server that a trial is running. After three
    missing ones another machine gets the trial."""
    trial_timeout_s: float | None = Field(None, gt=0)
    """Maximum duration of a training; a longer one is ended, the others continue."""
    folder: str = "data/08_reporting/sweep_logs"
    """Folder of one folder per trial: the request, its log, checkpoints and answer."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _earlier_name(cls, name: Any) -> Any:
        return "tpe" if name == "optuna" else name

    @field_validator("grid", "ranges", mode="before")
    @classmethod
    def _by_path(cls, value: Any) -> Any:
        """Convert --params' nested groups to dotted names; null drops a setting."""
        if not isinstance(value, Mapping):
            return value
        # A null may be nested after the dotted name that conf/base has.
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
        if isinstance(value, Mapping) and "low" not in value:
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
