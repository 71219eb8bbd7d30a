"""The process, the model and its training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flatout.engine.parameters.common import (
    BESIDE,
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
from flatout.engine.parameters.measuring import SlowHabits

Weight = Annotated[float, Field(ge=0)]
VARIABLES = {
    "MKL_SERVICE_FORCE_INTEL": "1",
    "MKL_THREADING_LAYER": "GNU",
    "TOKENIZERS_PARALLELISM": "false",
    "GOMP_SPINCOUNT": "10000",
}
"""Waiting threads spin briefly, then yield: docs/optimisations.md#cpu-threads."""


class RuntimeSettings(SettingsModel):
    """The process and the device. `environment` is set before torch is imported."""

    seed: int = Field(42, ge=0, lt=2**32)
    """Weights, dropout, order of the rows."""
    deterministic: bool = parameter(False, EXECUTION)
    """Bitwise repeatable on one device; slower on a GPU."""
    precision: Precision | Auto = parameter("auto", reported="precision")
    """Compute type; weights and optimizer stay fp32. auto: bf16 where it is fast."""
    residual: Literal["auto", "fp32", "bf16"] = parameter("auto", reported="residual")
    """Residual stream under bf16 autocast (residual.py). auto: bf16 on a GPU."""
    tf32: bool = parameter(True, EXECUTION)
    """Matrix products of fp32 with 10 bits of mantissa, on NVIDIA GPUs."""
    cudnn_benchmark: bool = parameter(True, EXECUTION)
    """Let cuDNN try its kernels for each shape."""
    flash_sdp: bool = parameter(True, EXECUTION)
    """Let SDPA use its flash kernel; it takes no padding mask."""
    attention: Literal["auto", "eager", "sdpa", "varlen"] = parameter(
        "auto", EXECUTION, reported="attention"
    )
    """`eager` or `sdpa` for padded batches, `varlen` for packed ones: PyTorch's flash
    kernel. auto: the fastest that is installed and computes the same."""
    memory_limit_gib: float | None = parameter(None, EXECUTION, gt=0)
    """Most that PyTorch may take of a GPU's memory, as of a smaller card. null: all
    that other programs leave."""
    threads: Count | Auto = parameter("auto", EXECUTION, reported="threads")
    """OMP and MKL threads. auto: 1 beside a GPU, the usable cores without one."""
    environment: dict[str, str] = parameter(VARIABLES, EXECUTION)
    """Variables that are set before torch is imported; others are added to these."""

    @field_validator("environment")
    @classmethod
    def _over_the_default(cls, given: dict[str, str]) -> dict[str, str]:
        return {**VARIABLES, **given}


class ModelSettings(SettingsModel):
    """What is trained: a checkpoint (name or folder), or a config from scratch."""

    task: str = "sequence-classification"
    """Name of a task (engine/tasks), or a dotted path to a class of one's own."""
    family: str | None = parameter(None, EXECUTION)
    """A module of one's own that makes a family of models known (engine/families)."""
    name_or_path: str | None = None
    """A checkpoint (name on the Hub, or folder). null: from scratch, by `config`."""
    revision: str | None = None
    """Commit of the checkpoint's repository. null: its newest."""
    trust_remote_code: bool = parameter(False, EXECUTION)
    """Run the model's own code; of a repository only with `revision`."""
    config: dict[str, Any] = {}
    """From scratch: `model_type` and its sizes. Not read with `name_or_path`."""
    overrides: dict[str, Any] = {}
    """What to change in a checkpoint's config. Not read without `name_or_path`."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """masked-lm: share of tokens that are targets (BERT: Devlin et al. 2018)."""
    crop_area: float = Field(0.35, gt=0, le=1)
    """image-classification: least share of an image that a random crop keeps."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """image-classification: share of images that are mirrored, left to right."""
    label_threshold: float = Field(0.5, gt=0, lt=1)
    """multi-label-classification: a label is given above this probability."""
    pooling: Literal["auto", "mean", "first", "last"] = "auto"
    """embedding: the tokens whose states make the vector of a text. auto: as the
    checkpoint's 1_Pooling/config.json says, else mean."""
    temperature: float = Field(0.05, gt=0)
    """embedding: cosine similarities are divided by it (20 as a scale)."""
    matryoshka: list[Annotated[int, Field(ge=1)]] = []
    """embedding: sizes at which the beginning of a vector is trained as a vector of
    its own (Kusupati et al. 2022); their losses are added. Empty: the whole one."""

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
        if self.trust_remote_code and (fault := self._unpinned_code()):
            raise ValueError(fault)
        return self

    def _unpinned_code(self) -> str | None:
        """What could change below a training; code in a folder stays as it is."""
        folder = Path(self.name_or_path or "")
        if not (self.name_or_path and folder.is_dir()):
            pin = (
                "trust_remote_code runs code from the model's repository: pin it with "
                "revision (a commit hash)"
            )
            return None if self.revision else pin
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # loading it says what is wrong
        named = json.dumps(config.get("auto_map"))
        if "--" not in named:
            return None
        return (
            f"trust_remote_code: {folder}/config.json names code of another repository "
            f"({named}), which no revision pins: copy it into the folder"
        )


class LoaderSettings(SettingsModel):
    """How batches are made beside the training."""

    num_workers: CountOrZero | Auto = parameter("auto", reported="num_workers")
    """Processes that make batches. 0: the training process itself."""
    prefetch_factor: int = Field(2, ge=1)
    """Global batches that each worker prepares ahead."""
    pin_memory: bool = True
    """Page-locked host memory, for copies beside the compute."""
    persistent_workers: bool = True
    """Keep the workers from epoch to epoch."""
    timeout_s: float = Field(300, gt=0)
    """A worker that gives nothing for so long is an error."""


class CheckpointSettings(SettingsModel):
    """When a training is saved, to go on from there."""

    every_steps: int | None = Field(None, ge=1)
    """null: no checkpoint inside the run but those by time and at an interruption."""
    every_minutes: float | None = parameter(15, MACHINE, gt=0)
    """The first one comes after a minute. null: none by the clock."""
    keep: int = parameter(2, MACHINE, ge=1)
    """Newest checkpoints kept, beside the best."""


class DistributedSettings(SettingsModel):
    """Several devices and machines."""

    num_processes: Count | Auto = parameter("auto", MACHINE, BESIDE)
    """Processes on this machine. auto: one a GPU; one without GPU."""
    num_machines: int = Field(1, ge=1)
    """Machines that train together; each runs the same command."""
    machine_rank: int = parameter(0, MACHINE, BESIDE, ge=0)
    """Of this machine, 0 to `num_machines` - 1."""
    rendezvous_endpoint: str | None = parameter(None, MACHINE, BESIDE)
    """host:port of machine 0, where `num_machines` is over 1."""
    max_restarts: int = Field(0, ge=0)
    """Times that a failed job goes on from its newest checkpoint."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How ranks share the model: whole copies (ddp), or shards (fsdp)."""
    bucket_mib: Count | Literal["all"] = 25
    """Gradients that travel together (ddp). all: at once, behind the backward pass;
    quicker where GPUs are linked well, because what travels beside matrix products
    takes their multiprocessors. Steps of CUDA graphs do it at once in any case."""
    timeout_s: float = Field(600, gt=0)
    """Longest wait of a collective operation before the job is ended."""
    heartbeat_timeout_s: float = parameter(300, MACHINE, gt=0)
    """Seconds without a step before a rank counts as hung."""

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


class TrainSettings(SlowHabits):
    """Steps, optimizer, and how they are carried out."""

    rows: Literal["tokens", "arrays", "images"] = "tokens"
    """What a sample is: tokens of a text, numbers of a fixed shape, an image. Entries
    of the catalog have its name, as `train_images`."""
    batching: Strategy | Auto = parameter("auto", EXECUTION, reported="strategy")
    """How rows become micro-batches. auto: packed where it runs, else grouped."""
    global_batch_size: int = Field(32, ge=1)
    """Samples an optimizer step, over all ranks and micro-batches."""
    token_budget: Count | Auto = parameter("auto", EXECUTION, reported="token_budget")
    """Most tokens, padding included, of one micro-batch on one device. auto: what its
    memory holds, at most 65,536 on a GPU and 8,192 without one."""
    epochs: float = parameter(3, BESIDE, gt=0)
    """Passes over the training rows, if max_steps is null; a part of one is allowed."""
    max_steps: int | None = parameter(None, BESIDE, ge=1)
    """Optimizer steps, in place of `epochs`. null: as many as `epochs` needs."""
    learning_rate: float = Field(5e-5, gt=0)
    """Peak, reached after the warm-up."""
    learning_rate_at_batch: Count | None = None
    """The global batch that learning_rate is for. Another one trains at it times the
    square root of their ratio (Krizhevsky 2014). null: each trains at learning_rate."""
    optimizer: Literal["adamw", "adafactor", "muon", "sgd"] | str = "adamw"
    """Of torch.optim, or the dotted path of another, as torch.optim.NAdam. muon: for
    matrices of layers, beside adamw for all else. Fused, and in CUDA graphs, is adamw
    alone."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of an optimizer that is named by a path, as `{eps: 1.0e-6}`."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Of sgd and muon. null: 0.9 and 0.95."""
    weight_decay: float = Field(0.01, ge=0)
    """Not of biases and norms."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Each layer learns at this share of the rate of the one above; the last one, and
    what is behind it, at the whole. null: all alike."""
    freeze: list[str] = []
    """Regular expressions for names of modules that stay as they are, as `embeddings`
    and `encoder.layer.[0-5]`. The lowest ones cost no backward pass."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the denominator of an update."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are clipped to this norm. null: they are not."""
    class_weights: Literal["balanced"] | dict[str, Weight] | list[Weight] | None = None
    """Of the loss, in training alone: by the class's name (1 where none is given), or
    in the order of label_names. balanced: each class counts as much in all."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of a target that is spread over all classes, in training alone."""
    focal_gamma: float = Field(0.0, ge=0)
    """Focal loss (Lin et al. 2017): losses count (1 - probability of the target) to
    this power, in training alone. 0: all count the same."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] | str = "linear"
    """Of the learning rate, after the warm-up. wsd: stable at its peak, then linear.
    Or the dotted path of a function (step, total_steps) -> share of learning_rate,
    which stands for the warm-up and min_learning_rate_share too."""
    min_learning_rate_share: float = Field(0.0, ge=0, le=1)
    """Of the peak, at which the schedule ends."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """wsd: share of all steps in which the rate falls."""
    warmup_fraction: float = Field(0.06, ge=0, lt=1)
    """Share of all steps."""
    log_every: int = parameter(20, EXECUTION, ge=1)
    """Steps of a window: rates are measured and metrics read once a window."""
    metrics_every: int = parameter(10, EXECUTION, ge=1)
    """Steps between two updates of the training accuracy (kept on the device)."""
    error_analysis_every: int | None = parameter(1000, EXECUTION, BESIDE, ge=1)
    """Steps between two looks at five wrong validation rows, of tasks with one target a
    row; null: none, at the end neither."""
    evaluate_every: Count | Literal["epoch"] | None = parameter("epoch", EXECUTION)
    """Steps, `epoch`, or null for once at the end."""
    metric: str | None = None
    """Of an evaluation, by which the best model is chosen, as `f1_macro`: a figure of
    the task, which knows whether higher is better, or one of compute_metrics. null: the
    loss."""
    compute_metrics: str | None = None
    """Dotted path of a function (predictions, labels) -> figures of an evaluation by
    name, beside the task's."""
    greater_is_better: bool | None = None
    """Of train.metric, if it is a figure of compute_metrics. null: true, unless its
    name ends with loss."""
    callbacks: list[str] = parameter([], EXECUTION, BESIDE)
    """Dotted paths of functions (event, step, values), called on the main rank at log
    points, evaluations, checkpoints and the end. Figures that they return are kept."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """End after so many evaluations in a row without a new best. null: all steps."""
    compile: bool | Auto = parameter("auto", EXECUTION, MACHINE, reported="compile")
    """torch.compile. auto: on a GPU, if the steps planned end sooner with it."""
    cuda_graphs: bool | Auto = parameter("auto", EXECUTION, reported="cuda_graphs")
    """Record steps and replay them, which spares the CPU. auto: as compile."""
    gradient_checkpointing: bool = parameter(False, EXECUTION)
    """Less memory for about a third more compute."""
    fused_optimizer: bool = parameter(True, EXECUTION)
    """One kernel for all tensors (adamw)."""
    resume: str = parameter("auto", EXECUTION, MACHINE, BESIDE)
    """`auto` (go on from the newest sound checkpoint), `never`, or a folder."""
    on_oom: Literal["stop", "shrink"] = parameter("shrink", EXECUTION)
    """Out of memory: stop, or halve the token budget (the global batch stays). Several
    machines stop."""
    deadline_hours: float | None = parameter(None, EXECUTION, MACHINE, BESIDE, gt=0)
    """Warn when the projected end passes it."""
    loader: LoaderSettings = parameter(LoaderSettings(), EXECUTION, MACHINE)
    checkpoint: CheckpointSettings = parameter(CheckpointSettings(), EXECUTION, BESIDE)
    distributed: DistributedSettings = parameter(DistributedSettings(), EXECUTION)

    @field_validator("class_weights", mode="before")
    @classmethod
    def _named_by_text(cls, given: Any) -> Any:
        """YAML reads the class 3 as a number."""
        if not isinstance(given, dict):
            return given
        return {str(name): weight for name, weight in given.items()}

    @field_validator("callbacks", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        """--params has no lists."""
        return [given] if isinstance(given, str) else given

    @field_validator("freeze")
    @classmethod
    def _patterns(cls, given: list[str]) -> list[str]:
        for pattern in given:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no pattern: {error}") from error
        return given

    @field_validator("optimizer", "schedule")
    @classmethod
    def _known_or_own(cls, given: str, info: ValidationInfo) -> str:
        known, _ = get_args(cls.model_fields[str(info.field_name)].annotation)
        *names, last = map(repr, get_args(known))
        if given not in get_args(known) and "." not in given:
            raise ValueError(
                f"should be {', '.join(names)} or {last}, or a dotted path"
            )
        return given

    @property
    def peak_learning_rate(self) -> float:
        """At the global batch that is trained with."""
        meant = self.learning_rate_at_batch or self.global_batch_size
        return self.learning_rate * math.sqrt(self.global_batch_size / meant)

    @model_validator(mode="after")
    def _whole_matrices(self) -> TrainSettings:
        needs_whole = self.optimizer in ("adafactor", "muon")
        if needs_whole and self.distributed.strategy == "fsdp":
            raise ValueError(
                f"optimizer {self.optimizer} needs whole matrices: set "
                "distributed.strategy: ddp, or optimizer: adamw"
            )
        return self

    @model_validator(mode="after")
    def _options_of_own_parts(self) -> TrainSettings:
        if self.optimizer_options and "." not in self.optimizer:
            raise ValueError(
                "optimizer_options are for an optimizer that is named by its dotted "
                f"path: {self.optimizer} has parameters of its own"
            )
        taken = {"lr": "learning_rate", "weight_decay": "weight_decay"}
        for name in taken.keys() & self.optimizer_options.keys():
            raise ValueError(f"optimizer_options: {name} is train.{taken[name]} here")
        if self.greater_is_better is not None and self.compute_metrics is None:
            raise ValueError(
                "greater_is_better is for a figure of compute_metrics: the task knows "
                "it of its own"
            )
        return self

    @model_validator(mode="after")
    def _room_for_the_schedule(self) -> TrainSettings:
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                "warmup_fraction and decay_fraction are more than all steps: lower one"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_to_stop(self) -> TrainSettings:
        if self.early_stopping_patience and self.evaluate_every is None:
            raise ValueError(
                "early_stopping_patience needs evaluations before the end: set "
                "evaluate_every to epoch or a number of steps"
            )
        return self


class PathSettings(SettingsModel):
    """Where training works; no part of what is trained."""

    checkpoints: str = "data/06_models/checkpoints"
    """Folder."""
    metrics: str = "data/08_reporting/train_metrics.jsonl"
    """File, one JSON object a log point."""
    tuned: str | None = None
    """File that the benchmark writes for `--env=tuned`; null: `conf/tuned`."""
    best: str | None = None
    """File that the sweep writes for `--env=best`; null: `conf/best`."""
