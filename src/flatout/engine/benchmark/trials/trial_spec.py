"""What a trial is asked, and the line of the table that it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import xxhash

from flatout.engine.parameters import BenchmarkSettings, Settings, parse_settings
from flatout.engine.parameters.common import set_by_path

Kind = Literal[
    "end_to_end",
    "again",
    "compute",
    "baseline",
    "loader",
    "memory",
    "device",
    "profile",
    "train",
]
"""What a trial measures: training whole; the rates alone of settings that were measured
before, in one more process; steps on batches that lie on the device already; what
stands below a rung, window by window; the loader alone; the largest token budget; the
device's peak; where the time of a few steps goes, operator by operator; a whole
training (the sweep)."""


@dataclass(frozen=True)
class Measure:
    """How long a trial measures."""

    steps: int = 20
    """Optimizer steps of a block: the rows that every window goes over."""
    warmup_steps: int = 3
    repeats: int = 3
    """Windows; the median counts."""
    min_window_s: float = 1.0
    """A block is repeated until a window is at least so long."""
    max_window_s: float = 2.5
    """Where steps are slow, a block has fewer of them."""
    headroom: float = 0.1
    """Share of the device's memory that stays free."""
    slow_rows_ms: float = 20.0

    @classmethod
    def of(cls, options: BenchmarkSettings) -> Measure:
        return cls(
            steps=options.steps_per_trial,
            warmup_steps=options.warmup_steps,
            repeats=options.repeats,
            min_window_s=options.min_window_s,
            max_window_s=options.max_window_s,
            headroom=options.memory_headroom,
            slow_rows_ms=options.slow_rows_ms,
        )


@dataclass(frozen=True)
class Planned:
    """A trial that a mode will run; see `Bench.run`."""

    kind: Kind
    changes: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None


@dataclass(frozen=True)
class TrialSpec:
    """A question to the machine. `settings` are whole, with the changes applied."""

    kind: Kind
    mode: str
    settings: Settings
    measure: Measure = Measure()
    label: str = ""
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a kind needs beside the settings."""

    def as_json(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json", exclude={"benchmark", "sweep"})
        return {**asdict(replace(self, settings=None)), "settings": settings}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TrialSpec:
        settings = parse_settings(stored["settings"])
        measure = Measure(**stored["measure"])
        return cls(**{**stored, "settings": settings, "measure": measure})

    def key(self, context: Mapping[str, Any]) -> str:
        """Digest of all that decides the answer; `context` names data, versions and
        device."""
        dumped = self.settings.model_dump(
            mode="json", include={"runtime", "model", "tokenize", "train"}
        )
        asked = {**self.as_json(), "settings": dumped, **context}
        del asked["label"], asked["mode"]
        return xxhash.xxh3_64_hexdigest(json.dumps(asked, sort_keys=True).encode())


@dataclass(frozen=True)
class TrialResult:
    """A line of benchmark_trials.csv. None: not measured by this kind of trial."""

    trial_id: str
    mode: str
    strategy: str
    global_batch_size: int
    token_budget: int | str
    num_workers: int | str
    prefetch_factor: int
    pin_memory: bool
    precision: str
    attention: str
    compile: bool | str
    cuda_graphs: bool | str
    gradient_checkpointing: bool
    io_ms: float | None = None
    """Mean time a step lost waiting for its batch."""
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    total_ms: float | None = None
    """Wall time of a step, in windows without phase timing."""
    total_ms_p90: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    padding_pct: float | None = None
    mfu_pct: float | None = None
    """Share of the peak in the device's data sheet."""
    gpu_util_pct: float | None = None
    peak_memory_gib: float | None = None
    reserved_memory_gib: float | None = None
    compile_s: float | None = None
    recompiles: int | None = None
    status: str = "error"
    """ok, oom, error, timeout, or unpaired: what it stood beside has ended."""
    note: str = ""
    kind: str = "end_to_end"
    label: str = ""
    world_size: int = 1
    bucket_mib: int | str = 25
    """Gradients that travel together between devices; `all`."""
    samples_per_s_spread_pct: float | None = None
    """(highest - lowest) / median over the windows."""
    loader_samples_per_s: float | None = None
    """Rate of the loader alone."""
    host_ms: float | None = None
    """Time the host needs to launch a step (GPU)."""
    first_step_s: float | None = None
    """Cold: workers started, first batch, compilation, first step."""
    tflops_per_s: float | None = None
    share_of_measured_peak_pct: float | None = None
    times_below: float | None = None
    """Rate over that of the rung below, by turns (mode ladder)."""
    times_below_spread_pct: float | None = None
    """How far the middle half of the turns lies apart."""
    elapsed_s: float = 0.0
    """Of the whole trial, its process's start included."""
    key: str = ""
    log: str = ""
    """Empty where the trial was refused before it began."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def rate(self) -> float:
        """Samples/s; 0 where none was measured."""
        return self.samples_per_s or 0.0

    @classmethod
    def asked(cls, spec: TrialSpec, trial_id: str, key: str) -> TrialResult:
        """The line before the trial has run: settings as they were asked for."""
        runtime, train = spec.settings.runtime, spec.settings.train
        return cls(
            trial_id=trial_id,
            mode=spec.mode,
            strategy=train.batching,
            global_batch_size=train.global_batch_size,
            token_budget=train.token_budget,
            num_workers=train.loader.num_workers,
            prefetch_factor=train.loader.prefetch_factor,
            pin_memory=train.loader.pin_memory,
            precision=runtime.precision,
            attention=runtime.attention,
            compile=train.compile,
            cuda_graphs=train.cuda_graphs,
            gradient_checkpointing=train.gradient_checkpointing,
            kind=spec.kind,
            label=spec.label,
            world_size=spec.world_size,
            bucket_mib=train.distributed.bucket_mib,
            key=key,
        )

    def answered(self, answer: Mapping[str, Any]) -> TrialResult:
        """With the figures of `answer` that are columns."""
        names = {entry.name for entry in fields(self)}
        return replace(self, **{k: v for k, v in answer.items() if k in names})


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`settings` with values set by path (`train.loader.num_workers`), checked."""
    return parse_settings(set_by_path(settings.model_dump(mode="json"), changes))
