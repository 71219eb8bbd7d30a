"""The specification of a trial, and its row in the table of results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

import xxhash

from flatout.engine.parameters import BenchmarkSettings, Settings, parse_settings
from flatout.engine.parameters.common import set_by_path

KINDS = {
    "end_to_end": "measuring.measure:end_to_end",
    "again": "measuring.measure:again",
    "compute": "measuring.measure:compute",
    "baseline": "measuring.measure:baseline",
    "loader": "measuring.probes:loader",
    "profile": "measuring.probes:profile",
    "train": "trials.trial:train_whole",
}
"""The function in this package that measures each kind of trial.

`end_to_end` measures training with the loader. `again` repeats the throughput
measurement of `end_to_end` in another process. `compute` measures steps on batches that
are already on the device. `baseline` is the reference whose windows alternate with an
`end_to_end` trial. `loader` measures only the loader. `profile` profiles a few steps by
operator. `train` is a whole training run, used by the sweep.
"""
Changes = dict[str, Any]
"""Settings by path, for example `train.token_budget`."""
MEASURED = {
    "steps_per_trial",
    "warmup_steps",
    "repeats",
    "min_window_s",
    "max_window_s",
}
"""Parameters of the benchmark that affect how a trial is measured."""
ON_ALL_DEVICES = frozenset({"end_to_end", "again", "compute"})


@dataclass(frozen=True)
class TrialSpec:
    """A trial to run. `settings` are complete, with all changes applied."""

    kind: str
    mode: str
    settings: Settings
    label: str = ""
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this kind of trial, in addition to the settings."""

    @property
    def measure(self) -> BenchmarkSettings:
        """The benchmark parameters that determine how the trial is measured."""
        return self.settings.benchmark

    def as_json(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json", exclude={"sweep"})
        return {**asdict(replace(self, settings=None)), "settings": settings}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TrialSpec:
        return cls(**{**stored, "settings": parse_settings(stored["settings"])})

    def key(self, context: Mapping[str, Any]) -> str:
        """Return a digest of everything that affects the result. `context` identifies
        the data, the package versions and the device."""
        dumped = self.settings.model_dump(
            mode="json", include={"runtime", "model", "tokenize", "train"}
        )
        asked = {**self.as_json(), "settings": dumped, **context}
        if self.kind != "train":
            asked["measure"] = self.measure.model_dump(include=MEASURED)
        del asked["label"], asked["mode"]
        return xxhash.xxh3_64_hexdigest(json.dumps(asked, sort_keys=True).encode())


SETTING_BY_COLUMN = {
    "strategy": "train.batching",
    "global_batch_size": "train.global_batch_size",
    "token_budget": "train.token_budget",
    "num_workers": "train.loader.num_workers",
    "prefetch_factor": "train.loader.prefetch_factor",
    "pin_memory": "train.loader.pin_memory",
    "precision": "runtime.precision",
    "attention": "runtime.attention",
    "compile": "train.compile",
    "cuda_graphs": "train.cuda_graphs",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "bucket_mib": "train.distributed.bucket_mib",
}
"""Maps a column to the setting that it shows. If a trial has a metric of the same name,
the column shows this metric, which is the resolved value of the setting."""
COLUMNS = (
    *("trial_id", "mode"),
    *(name for name in SETTING_BY_COLUMN if name != "bucket_mib"),
    "io_ms",  # mean time that a step waits for its batch
    *("forward_ms", "backward_ms", "optimizer_ms"),
    "total_ms",  # mean wall time of a step, in windows without phase timing
    *("total_ms_p90", "samples_per_s", "tokens_per_s", "padding_pct"),
    "mfu_pct",  # fraction of the peak FLOP/s in the device's data sheet
    *("gpu_util_pct", "peak_memory_gib", "reserved_memory_gib"),
    *("compile_s", "recompiles", "status", "note", "kind", "label", "world_size"),
    "bucket_mib",  # size of a gradient bucket for all-reduce
    "samples_per_s_spread_pct",  # (highest - lowest) / median over the windows
    "loader_samples_per_s",  # throughput of the loader alone
    "host_ms",  # time that the host takes to launch a step (GPU only)
    "first_step_s",  # cold start: workers, first batch, compilation, first step
    "tflops_per_s",
    "times_below",  # throughput relative to the reference configuration
    "times_below_spread_pct",  # interquartile range of the pairs' ratios / median
    "elapsed_s",  # duration of the whole trial, including process start-up
    *("key", "log"),
)
"""The columns of benchmark_trials.csv."""


@dataclass(frozen=True)
class TrialResult:
    """The specification and result of a trial, stored as a row of benchmark_trials.csv.
    Every column is also an attribute. Values that were not measured are None."""

    trial_id: str
    spec: TrialSpec
    key: str = ""
    status: str = "error"
    """ok, oom, error, timeout, or unpaired if the reference process ended early."""
    note: str = ""
    elapsed_s: float = 0.0
    log: str = ""
    """Path of the log. Empty if the trial was rejected before it began."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """All measured values by name, including those without a column."""

    def __getattr__(self, name: str) -> Any:
        if name not in COLUMNS:
            raise AttributeError(name)
        if name in ("mode", "kind", "label", "world_size"):
            return getattr(self.spec, name)
        found = self.figures.get(name)
        if found is None and name in SETTING_BY_COLUMN:
            return attrgetter(SETTING_BY_COLUMN[name])(self.spec.settings)
        return found

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def rate(self) -> float:
        """Throughput in samples/s, or 0 if it was not measured."""
        return self.samples_per_s or 0.0

    def as_row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return `settings` with `changes` applied by path, for example
    `train.loader.num_workers`. Raises SettingsError if the result is invalid."""
    return parse_settings(set_by_path(settings.model_dump(mode="json"), changes))
