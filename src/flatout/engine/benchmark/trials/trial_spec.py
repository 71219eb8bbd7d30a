"""The specification of a trial, and its row of the table."""

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
"""The subject of a trial, and the function in this package that measures it: training
end to end; only the rates of settings that were measured before, in one more process;
steps on batches that are on the device already; the baseline of a rung, window by
window; only the loader; the time of a few steps by operator; a whole
training (the sweep)."""
Changes = dict[str, Any]
"""Settings by path, `train.token_budget`."""
MEASURED = {
    "steps_per_trial",
    "warmup_steps",
    "repeats",
    "min_window_s",
    "max_window_s",
}
"""Parameters of the benchmark that decide the measurement of a trial."""
ON_ALL_DEVICES = frozenset({"end_to_end", "again", "compute"})


@dataclass(frozen=True)
class TrialSpec:
    """One trial to run. `settings` are complete, with the changes applied."""

    kind: str
    mode: str
    settings: Settings
    label: str = ""
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the kind, in addition to the settings."""

    @property
    def measure(self) -> BenchmarkSettings:
        """Return the parameters that set how long it measures."""
        return self.settings.benchmark

    def as_json(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json", exclude={"sweep"})
        return {**asdict(replace(self, settings=None)), "settings": settings}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TrialSpec:
        return cls(**{**stored, "settings": parse_settings(stored["settings"])})

    def key(self, context: Mapping[str, Any]) -> str:
        """Return a digest of everything that decides the answer; `context` names data,
        versions and device."""
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
"""Columns of settings. A figure of the same name is the resolved value of `auto`."""
COLUMNS = (
    *("trial_id", "mode"),
    *(name for name in SETTING_BY_COLUMN if name != "bucket_mib"),
    "io_ms",  # mean time that a step lost waiting for its batch
    *("forward_ms", "backward_ms", "optimizer_ms"),
    "total_ms",  # wall time of a step, in windows without phase timing
    *("total_ms_p90", "samples_per_s", "tokens_per_s", "padding_pct"),
    "mfu_pct",  # share of the peak in the device's data sheet
    *("gpu_util_pct", "peak_memory_gib", "reserved_memory_gib"),
    *("compile_s", "recompiles", "status", "note", "kind", "label", "world_size"),
    "bucket_mib",  # of gradients per message between devices
    "samples_per_s_spread_pct",  # (highest - lowest) / median over the windows
    "loader_samples_per_s",  # of a loader without steps
    "host_ms",  # for the host to launch a step (GPU)
    "first_step_s",  # cold: workers, first batch, compilation, first step
    "tflops_per_s",
    "times_below",  # rate divided by that of the paired configuration
    "times_below_spread_pct",  # spread of the middle half of the pairs' ratios
    "elapsed_s",  # of the whole trial, including its process's start
    *("key", "log"),
)
"""Columns of benchmark_trials.csv."""


@dataclass(frozen=True)
class TrialResult:
    """Specification and result of a trial: a row of benchmark_trials.csv. Columns can
    be read as attributes; None: not measured by this kind of trial."""

    trial_id: str
    spec: TrialSpec
    key: str = ""
    status: str = "error"
    """ok, oom, error, timeout, or unpaired: its paired process has ended."""
    note: str = ""
    elapsed_s: float = 0.0
    log: str = ""
    """Path of the log; empty if the trial was refused before it began."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """All measured figures, including those without a column."""

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
        """Rate in samples/s; 0 if it was not measured."""
        return self.samples_per_s or 0.0

    def as_row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return `settings` with values set by path (train.loader.num_workers), checked."""
    return parse_settings(set_by_path(settings.model_dump(mode="json"), changes))
