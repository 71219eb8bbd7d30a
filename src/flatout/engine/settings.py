"""Every parameter of flatout, its type, its bounds and its unit.

One model per `conf/base/parameters_<name>.yml`. Unknown keys are refused; all
faults are reported at once, each with its path and the nearest valid name
(:func:`parse_settings`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

Strategy = Literal["fixed", "random", "grouped", "packed"]
Task = Literal["sequence-classification", "regression", "causal-lm", "masked-lm"]
Precision = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]

CLASSIFIES: frozenset[str] = frozenset({"sequence-classification", "regression"})
"""Tasks with one target a row; the others have one a token."""


class SettingsError(ValueError):
    """Parameters that cannot be used; the text lists every fault with its path."""


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
    )


class RuntimeSettings(_Model):
    """The process and the device. `environment` is set before torch is imported."""

    seed: int = Field(42, ge=0, lt=2**32)
    deterministic: bool = False
    """Bitwise repeatable on one device, 10-20 % slower on a GPU (guide B)."""
    precision: Precision | Auto = "auto"
    """Compute type; weights and optimizer stay fp32. auto: bf16 where it is fast."""
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Residual stream under bf16 autocast (residual.py). auto: bf16 on a GPU."""
    tf32: bool = True
    cudnn_benchmark: bool = True
    flash_sdp: bool = True
    """Let SDPA use its flash kernel (guide C); it takes no padding mask."""
    attention: Literal["auto", "eager", "sdpa", "varlen"] = "auto"
    """`eager` or `sdpa` for padded batches, `varlen` for packed ones. auto: the
    fastest that computes the same."""
    threads: Count | Auto = "auto"
    """OMP and MKL threads. auto: 1 beside a GPU, the usable cores without one."""
    environment: dict[str, str] = {
        "MKL_SERVICE_FORCE_INTEL": "1",
        "MKL_THREADING_LAYER": "GNU",
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": "10000",
    }


class ModelSettings(_Model):
    """What is trained: a checkpoint (name or folder), or a config from scratch."""

    task: Task = "sequence-classification"
    name_or_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    config: dict[str, Any] = {}
    """From scratch: `model_type` and its sizes. Not read with `name_or_path`."""
    overrides: dict[str, Any] = {}
    """What to change in a checkpoint's config. Not read without `name_or_path`."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """masked-lm: share of tokens that are targets (BERT: Devlin et al. 2018)."""

    @property
    def applied_config(self) -> dict[str, Any]:
        """The one of `config` and `overrides` that counts."""
        return self.config if self.name_or_path is None else self.overrides

    @model_validator(mode="after")
    def _loadable(self) -> ModelSettings:
        if self.name_or_path is None and "model_type" not in self.config:
            raise ValueError(
                "give name_or_path (a checkpoint) or config.model_type (from scratch)"
            )
        if self.trust_remote_code and not self.revision:
            raise ValueError(
                "trust_remote_code runs code from the model's repository: pin it with "
                "revision (a commit hash)"
            )
        return self


class Fractions(_Model):
    train: float = Field(0.8, gt=0, lt=1)
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _sum_to_one(self) -> Fractions:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class SplitSettings(_Model):
    text_column: str = "text"
    text_pair_column: str | None = None
    label_column: str | None = "label"
    """null: unlabelled text, for language models."""
    group_column: str | None = None
    """Rows of one group never part (a patient, a document)."""
    fractions: Fractions = Fractions()
    max_rejected_fraction: float = Field(0.01, ge=0, le=1)
    """Stop when a larger share of the rows cannot be used."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Apart from `runtime.seed`: trainings with several seeds share one split."""


class TokenizeSettings(_Model):
    max_length: int = Field(320, ge=2)
    """Tokens, special tokens included; longer texts are cut."""
    vocab_size: int = Field(8_000, ge=64)
    """Word pieces of a tokenizer trained here (`model.name_or_path: null`)."""
    num_processes: Count | Auto = "auto"
    join_texts: bool = False
    """Language models: lay texts end to end in blocks of `max_length`."""


class LoaderSettings(_Model):
    num_workers: CountOrZero | Auto = "auto"
    prefetch_factor: int = Field(2, ge=1)
    """Global batches that each worker prepares ahead."""
    pin_memory: bool = True
    persistent_workers: bool = True
    timeout_s: float = Field(300, gt=0)
    """A worker that gives nothing for so long is an error."""


class CheckpointSettings(_Model):
    every_steps: int | None = Field(None, ge=1)
    """null: no checkpoint inside the run but those by time and at an interruption."""
    every_minutes: float | None = Field(15, gt=0)
    keep: int = Field(2, ge=1)


class DistributedSettings(_Model):
    num_processes: Count | Auto = "auto"
    """Processes on this machine. auto: one a GPU; one without GPU."""
    num_machines: int = Field(1, ge=1)
    machine_rank: int = Field(0, ge=0)
    rendezvous_endpoint: str | None = None
    """host:port of machine 0, where `num_machines` is over 1."""
    max_restarts: int = Field(0, ge=0)
    strategy: Literal["ddp", "fsdp"] = "ddp"
    timeout_s: float = Field(600, gt=0)
    """Longest wait of a collective operation before the job is ended."""
    heartbeat_timeout_s: float = Field(300, gt=0)

    @model_validator(mode="after")
    def _rendezvous(self) -> DistributedSettings:
        if self.num_machines > 1 and not self.rendezvous_endpoint:
            raise ValueError("num_machines over 1 needs rendezvous_endpoint: host:port")
        if self.machine_rank >= self.num_machines:
            raise ValueError(
                f"machine_rank {self.machine_rank} is not below num_machines "
                f"{self.num_machines}"
            )
        return self


class TrainSettings(_Model):
    strategy: Strategy | Auto = "auto"
    global_batch_size: int = Field(32, ge=1)
    """Samples an optimizer step, over all ranks and micro-batches."""
    token_budget: Count | Auto = "auto"
    """Most tokens, padding included, of one micro-batch on one device."""
    epochs: float = Field(3, gt=0)
    max_steps: int | None = Field(None, ge=1)
    learning_rate: float = Field(5e-5, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_fraction: float = Field(0.06, ge=0, lt=1)
    log_every: int = Field(20, ge=1)
    """Steps of a window: rates are measured and metrics read once a window."""
    metrics_every: int = Field(10, ge=1)
    """Steps between two updates of the training accuracy (kept on the device)."""
    error_analysis_every: int | None = Field(1000, ge=1)
    """Steps between two looks at wrongly labelled rows (5 ids each); null: never."""
    evaluate_every: Count | Literal["epoch"] | None = "epoch"
    """Steps, `epoch`, or null for once at the end."""
    compile: bool | Auto = "auto"
    cuda_graphs: bool | Auto = "auto"
    gradient_checkpointing: bool = False
    fused_optimizer: bool = True
    resume: str = "auto"
    """`auto` (go on from the newest sound checkpoint), `never`, or a folder."""
    on_oom: Literal["stop", "shrink"] = "stop"
    deadline_hours: float | None = Field(None, gt=0)
    synchronize_every_step: bool = False
    """Read the loss on the host after every step (only a measuring stick)."""
    history: Literal["list", "dataframe"] = "list"
    """`dataframe` joins a table at every step (only a measuring stick)."""
    empty_cache_every: int | None = Field(None, ge=1)
    loader: LoaderSettings = LoaderSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    distributed: DistributedSettings = DistributedSettings()


BenchmarkMode = Literal["tune", "grid", "ladder", "loader", "peers", "scaling"]


class BenchmarkSettings(_Model):
    mode: BenchmarkMode = "tune"
    batch_sizes: list[Count] = Field([8, 16, 32], min_length=1)
    """Global batches of the grid, samples."""
    num_workers: list[CountOrZero] = Field([0, 1], min_length=1)
    precisions: list[Precision | Auto] = Field(["auto"], min_length=1)
    strategies: list[Strategy] = Field(["grouped", "packed"], min_length=1)
    token_budgets: list[Count] = []
    """Empty: chosen around the tokens of one global batch."""
    steps_per_trial: int = Field(20, ge=2)
    warmup_steps: int = Field(3, ge=1)
    repeats: int = Field(3, ge=1)
    """Windows of `steps_per_trial` steps; the median counts."""
    min_window_s: float = Field(1.0, ge=0)
    """A window goes over its steps again until it is at least so long."""
    max_window_s: float = Field(2.5, gt=0)
    """Where steps are slow, a window has fewer of them, at least two."""
    tune_minutes: float = Field(5.0, gt=0)
    """Mode tune explores no further then, and confirms what it has."""
    max_minutes: float | None = Field(None, gt=0)
    """Any mode begins no trial after it; the next run goes on."""
    trial_timeout_s: float = Field(300, gt=0)
    """A trial that takes longer is ended; the others go on."""
    memory_headroom: float = Field(0.1, ge=0, lt=1)
    slow_rows_ms: float = Field(20.0, gt=0)
    """A batch whose making takes longer is named (mode loader)."""
    free_global_batch: bool = False
    learning_rate_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    deadline_hours: float = Field(72, gt=0)
    """Guide A asked for three days."""
    profile: bool = False
    resume: bool = True
    folder: str = "data/08_reporting/benchmark_logs"
    """A folder a mode, in it one a trial: what was asked, its log, its answer."""

    @field_validator(
        "batch_sizes",
        "num_workers",
        "precisions",
        "strategies",
        "token_budgets",
        mode="before",
    )
    @classmethod
    def _split_text(cls, value: Any) -> Any:
        """`8 16 32` as one text: --params takes a comma for the next parameter."""
        if isinstance(value, str):
            return value.split()
        return [value] if isinstance(value, int) else value


class PredictSettings(_Model):
    """How a saved model is applied to texts."""

    text_column: str = "text"
    text_pair_column: str | None = None
    id_column: str | None = None
    """Column that is carried over as `id`, as text."""
    max_length: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens of a row. auto: `tokenize.max_length`, or what the model takes if less."""
    strategy: Literal["grouped", "packed"] | Auto = "auto"
    token_budget: Count | Auto = "auto"
    """Most tokens, padding included, of one forward pass."""
    window_rows: int = Field(4_096, ge=1)
    """Rows that are held at a time, and sorted by length together."""


SweptValue = bool | int | float | str


class SweepRange(_Model):
    """Values between two bounds, both included; whole numbers where both are."""

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


class SweepSettings(_Model):
    """Trainings that differ in some settings, named by path (train.learning_rate)."""

    sampler: Literal["grid", "optuna"] = "grid"
    grid: dict[str, list[SweptValue]] = {
        "train.learning_rate": [3e-4, 1e-3],
        "train.global_batch_size": [16, 32],
    }
    """Values to try of each setting: every combination, or optuna's choice of them."""
    ranges: dict[str, SweepRange] = {}
    """sampler optuna: bounds in place of a list."""
    n_trials: int = Field(20, ge=1)
    """Trainings of sampler optuna, those of a stopped sweep included."""
    choose_by: Literal["validation_loss", "validation_accuracy"] = "validation_loss"
    trial_timeout_s: float | None = Field(None, gt=0)
    """A training that takes longer is ended; the others go on."""
    folder: str = "data/08_reporting/sweep_logs"
    """A folder a trial: what was asked, its log, its answer."""

    @field_validator("grid", "ranges", mode="before")
    @classmethod
    def _by_path(cls, value: Any) -> Any:
        """One level of dotted names, as --params nests them; null drops a setting."""
        return dict(_swept(value)) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _something_to_try(self) -> SweepSettings:
        if self.ranges and self.sampler == "grid":
            raise ValueError("ranges are for sampler optuna; grid takes lists")
        if not self.grid and not self.ranges:
            raise ValueError("nothing to try: name a setting in grid")
        empty = [path for path, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"no values to try for {', '.join(empty)}")
        return self


def _swept(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and "low" not in value:
            yield from _swept(value, f"{path}.")
        elif isinstance(value, str):
            yield path, [_number_or_text(part) for part in value.split()]
        elif value is not None:
            yield path, value if isinstance(value, (list, Mapping)) else [value]


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


class CorpusSettings(_Model):
    """The built-in corpus, where a run asks for another size of it."""

    rows: int | None = Field(None, ge=10)
    labels: int | None = Field(None, ge=2)


class TrackingSettings(_Model):
    """What MLflow gets beside parameters, metrics and reports."""

    log_model: bool = True
    """The best model, loadable with `mlflow.pyfunc`."""
    system_metrics: bool = True
    """Load of cores, memory, disk, network and GPUs, every 10 s, under `system/`."""
    registered_model: str | None = "flatout"
    """Name in the model registry; the best by validation gets the alias champion."""


class GuardSettings(_Model):
    """Holds a training's speed against that of the best earlier run of the same work
    on the same device (guide C)."""

    enabled: bool = True
    baseline: str | None = None
    """Id of an MLflow run. null: the fastest of the same work on the same device."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    healthy_high_pct: float = Field(120, ge=100)
    on_slow: Literal["warn", "fail"] = "warn"
    """`fail`: the command ends with an error once all results are saved."""
    max_differences: int = Field(5, ge=1)
    """Shown in the log; all of them are in guard.json."""
    store_limit_s: float = Field(10, gt=0)
    """Longest wait for the tracking store's answer."""


class PathSettings(_Model):
    """Where training works; no part of what is trained."""

    checkpoints: str = "data/06_models/checkpoints"
    """Folder."""
    metrics: str = "data/08_reporting/train_metrics.jsonl"
    """File, one JSON object a log point."""


class Settings(_Model):
    """All parameters together, as `conf/*/parameters_*.yml` spell them."""

    data_dir: str | None = None
    """Read by the catalog; here so that `--params=data_dir=...` is no unknown key."""
    corpus: CorpusSettings = CorpusSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    model: ModelSettings = ModelSettings(config={"model_type": "bert"})
    split: SplitSettings = SplitSettings()
    tokenize: TokenizeSettings = TokenizeSettings()
    train: TrainSettings = TrainSettings()
    benchmark: BenchmarkSettings = BenchmarkSettings()
    predict: PredictSettings = PredictSettings()
    sweep: SweepSettings = SweepSettings()
    tuned: dict[str, Any] = {}
    """Where conf/tuned comes from; written by the benchmark, read by nothing else."""
    tracking: TrackingSettings = TrackingSettings()
    guard: GuardSettings = GuardSettings()
    paths: PathSettings = PathSettings()


def parse_settings(parameters: Mapping[str, Any]) -> Settings:
    """Check `parameters` whole. Raises SettingsError that names every fault."""
    try:
        return Settings.model_validate(dict(parameters))
    except ValidationError as error:
        faults = _fault_lines(error.errors())
        count = len(faults)
        raise SettingsError(
            f"{count} parameter{'s' if count > 1 else ''} cannot be used; nothing was "
            "run. Mend them in conf/ or on the command line (--params):\n"
            + "\n".join(f"  {fault}" for fault in faults)
        ) from None


def _fault_lines(errors: Any) -> list[str]:
    """A line a path; what several branches of a union say is joined by `or`."""
    texts: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for fault in errors:
        location = [part for part in fault["loc"] if not _is_union_branch(part)]
        path = ".".join(str(part) for part in location)
        texts.setdefault(path, []).append(_fault_text(fault, location))
        values[path] = _shown_value(fault)
    return [f"{path}: {' or '.join(texts[path])}{values[path]}" for path in texts]


def _fault_text(fault: Any, location: list[Any]) -> str:
    """`unknown parameter; did you mean train.global_batch_size?`"""
    if fault["type"] == "extra_forbidden":
        names = _names_beside(location)
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.4)
        parent = "".join(f"{part}." for part in location[:-1])
        hint = f"did you mean {parent}{near[0]}?" if near else f"valid: {names}"
        return f"unknown parameter; {hint}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be", "should be").replace("a valid ", "a ")


def _shown_value(fault: Any) -> str:
    value = fault["input"]
    unknown = fault["type"] == "extra_forbidden"
    return (
        "" if unknown or isinstance(value, (dict, BaseModel)) else f" (got {value!r})"
    )


def _is_union_branch(part: object) -> bool:
    """Pydantic names the branch of a union in the path; users do not know those."""
    return isinstance(part, str) and (
        part in {"int", "constrained-int", "float", "bool", "str"}
        or part.startswith("literal[")
    )


def _names_beside(location: list[Any]) -> list[str]:
    """Valid names on the level of the last part of `location`."""
    model: type[BaseModel] = Settings
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(
            c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)
        )
    return sorted(model.model_fields)
