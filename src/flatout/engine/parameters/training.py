"""Parameters of the model and its training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    PATH,
    UNTIMED,
    Auto,
    Count,
    Names,
    RowNumbers,
    SettingsModel,
    Strategy,
    parameter,
)
from flatout.engine.parameters.execution import (
    CheckpointSettings,
    DistributedSettings,
    LoaderSettings,
)
from flatout.engine.parameters.lora import LoraSettings
from flatout.engine.parameters.measuring import SlowHabits

Weight = Annotated[float, Field(ge=0)]


class ModelSettings(SettingsModel):
    """The model to train, either a checkpoint or a config for training from scratch."""

    task: str = "sequence-classification"
    """Name of a task (engine/tasks), or the dotted path of a custom class."""
    family: str | None = parameter(None, EXECUTION)
    """Custom module that registers a model family (engine/families)."""
    name_or_path: str | None = None
    """Checkpoint (a name on the Hub or a folder). If null, the model is trained from
    scratch with `config`."""
    revision: str | None = None
    """Commit of the checkpoint's repository. If null, the newest commit is used."""
    trust_remote_code: bool = parameter(False, EXECUTION)
    """Run the model's own code. To run code from a repository, also set `revision`."""
    config: dict[str, Any] = {}
    """Config of a model trained from scratch, with its `model_type` and sizes. Ignored
    if `name_or_path` is set."""
    overrides: dict[str, Any] = {}
    """Changes to a checkpoint's config. Ignored without `name_or_path`."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """masked-lm: fraction of tokens that are targets (BERT: Devlin et al. 2018)."""
    crop_area: float = Field(0.35, gt=0, le=1)
    """image-classification: smallest fraction of the area that a random crop keeps."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """image-classification: probability that an image is flipped horizontally."""
    label_threshold: Annotated[float, Field(gt=0, lt=1)] | Auto = 0.5
    """Probability above which a label, or the second of two classes, is predicted. With
    `auto`, the `evaluate` pipeline chooses for each label the threshold that maximises
    F1 on the validation split."""
    pooling: Literal["auto", "mean", "first", "last"] = "auto"
    """embedding: how hidden states are pooled into the vector of a text. `auto` uses
    the checkpoint's 1_Pooling/config.json, or the mean if there is none."""
    temperature: float = Field(0.05, gt=0)
    """embedding: value by which cosine similarities are divided. 0.05 corresponds to a
    scale of 20."""
    matryoshka: list[Annotated[int, Field(ge=1)]] = []
    """embedding: sizes of vector prefixes that are trained as separate embeddings
    (Kusupati et al. 2022). Their losses are added. To train the whole vector too,
    include its size. If empty, only the whole vector is trained."""
    lora: LoraSettings = LoraSettings()

    @property
    def applied_config(self) -> dict[str, Any]:
        """The `config` of a new model, or the `overrides` of a checkpoint."""
        return self.config if self.name_or_path is None else self.overrides

    @model_validator(mode="after")
    def _loadable(self) -> ModelSettings:
        if self.name_or_path is None and "model_type" not in self.config:
            raise ValueError(
                "give name_or_path (a checkpoint) or config.model_type (from scratch)"
            )
        if self.lora.is_on and self.name_or_path is None:
            raise ValueError(
                f"lora.rank={self.lora.rank} needs a checkpoint to adapt: set "
                "name_or_path, or lora.rank: null"
            )
        if self.trust_remote_code and (fault := self._unpinned_code()):
            raise ValueError(fault)
        return self

    def _unpinned_code(self) -> str | None:
        """Return why the model's code could change between runs, or None."""
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
            return None  # loading the model reports the problem
        named = json.dumps(config.get("auto_map"))
        if "--" not in named:
            return None
        return (
            f"trust_remote_code: {folder}/config.json names code of another repository "
            f"({named}), which no revision pins: copy it into the folder"
        )


class TrainSettings(SlowHabits):
    """Settings of the training, the optimizer, and the execution of steps."""

    rows: str = "tokens"
    """Kind of samples: `tokens` of texts, numeric `arrays`, `images`, or the dotted
    path of a custom class. Catalog entry names contain the kind, for example
    `train_images`."""
    batching: Strategy | Auto = parameter("auto", EXECUTION, reported="strategy")
    """How micro-batches are formed. `auto` uses `packed` if possible, or else
    `grouped`."""
    global_batch_size: int = Field(32, ge=1)
    """Number of samples per optimizer step, over all ranks and micro-batches."""
    token_budget: Count | Auto = parameter("auto", EXECUTION, reported="token_budget")
    """Maximum number of tokens in a micro-batch on one device, including padding.
    `auto` depends on the available memory and is at most 65,536 on a GPU and 8,192
    without one."""
    epochs: float = parameter(3, UNTIMED, gt=0)
    """Number of passes over the train rows, e.g. 0.5. Ignored if `max_steps` is set."""
    max_steps: int | None = parameter(None, UNTIMED, ge=1)
    """Number of optimizer steps. If null, `epochs` determines the number."""
    skip_rows: RowNumbers = parameter([], EXECUTION, UNTIMED, PATH)
    """Training rows to leave out: row numbers, or a file of them (text with one number
    per line, or Parquet with a column `row`). Global batches that contain them become
    smaller. If the list changes before a run resumes, the change applies to the
    remaining steps."""
    learning_rate: float = Field(5e-5, gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    learning_rate_at_batch: Count | None = None
    """Global batch size to which learning_rate refers. For other sizes, the learning
    rate is scaled by the square root of the ratio (Krizhevsky 2014). If null, it is not
    scaled."""
    optimizer: Literal["adamw", "adafactor", "sgd"] | str = "adamw"
    """Optimizer, or the dotted path of another optimizer class, such as
    torch.optim.NAdam. Only adamw is fused and supports CUDA graphs."""
    optimizer_options: dict[str, Any] = {}
    """Arguments for an optimizer given by its path, for example `{eps: 1.0e-6}`."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Momentum of sgd. If null, it is 0.9."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay. It is not applied to biases and normalisation layers."""
    freeze: list[str] = []
    """Regular expressions for the names of modules that are not trained, for example
    `embeddings` and `encoder.layer.[0-5]`. There is no backward pass below the lowest
    trained layer."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Value added to the denominator of the update for numerical stability."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum gradient norm. Larger gradients are clipped. Null disables clipping."""
    class_weights: Literal["balanced"] | dict[str, Weight] | list[Weight] | None = None
    """Class weights of the training loss, by class name (default 1) or in the order of
    label_names. `balanced` gives all classes the same total weight."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Fraction of the target probability that is spread evenly over all classes in the
    training loss."""
    focal_gamma: float = Field(0.0, ge=0)
    """Focal loss (Lin et al. 2017): multiply training losses by (1 - probability of the
    target) to this power. 0 disables the focal loss."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] | str = "linear"
    """Learning rate schedule after the warm-up. `wsd` stays at the peak, then decays
    linearly. A dotted path specifies a function (step, total_steps) -> fraction of
    learning_rate, which also replaces the warm-up and min_learning_rate_share."""
    min_learning_rate_share: float = Field(0.0, ge=0, le=1)
    """Fraction of the peak learning rate at which the schedule ends."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """wsd: fraction of all steps during which the learning rate decays."""
    warmup_fraction: float = Field(0.06, ge=0, lt=1)
    """Fraction of all steps during which the learning rate rises."""
    log_every: int = parameter(20, EXECUTION, ge=1)
    """Number of steps between log entries of throughput and metrics."""
    metrics_every: int = parameter(10, EXECUTION, ge=1)
    """Steps between updates of the training accuracy, computed on the device."""
    audit: bool = parameter(False, EXECUTION)
    """Record on the device how well each training row is learned, and write rows with
    suspect labels to suspect_rows.parquet (tasks with one class per row)."""
    evaluate_every: Count | Literal["epoch"] | None = parameter("epoch", EXECUTION)
    """Number of steps between evaluations, `epoch` to evaluate after each epoch, or
    null to evaluate only at the end."""
    metric: str | None = None
    """Metric that selects the best model, for example `f1_macro`: a metric of the task
    or of compute_metrics. If null, the loss is used."""
    compute_metrics: str | None = None
    """Dotted path of a function that maps predictions and labels to a dict of metrics.
    These are reported in addition to the task's own metrics."""
    greater_is_better: bool | None = None
    """Whether a higher value of train.metric is better. This can be set only for a
    metric of compute_metrics. If null, higher values are better unless the name of the
    metric ends with loss."""
    callbacks: Names = parameter([], EXECUTION, UNTIMED)
    """Dotted paths of functions (event, step, values), called in the main process at
    logging steps, evaluations, checkpoints and the end of training. Metrics that they
    return are logged."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Number of consecutive evaluations without a new best result after which training
    ends. If null, training never ends early."""
    compile: bool | Auto = parameter("auto", EXECUTION, MACHINE, reported="compile")
    """Use torch.compile. `auto` uses it on a GPU if the run is expected to end sooner
    with it, including the compile time."""
    cuda_graphs: bool | Auto = parameter("auto", EXECUTION, reported="cuda_graphs")
    """Capture steps as CUDA graphs and replay them, which saves CPU time. `auto` uses
    graphs if the run is expected to end sooner with them."""
    gradient_checkpointing: bool = parameter(False, EXECUTION)
    """Recompute activations in the backward pass, which saves memory but needs about a
    third more compute."""
    fused_optimizer: bool = parameter(True, EXECUTION)
    """Update all tensors with a single kernel (adamw)."""
    resume: str = parameter("auto", EXECUTION, MACHINE, UNTIMED)
    """Checkpoint to resume from: `auto` (the newest valid one), `never`, or a
    folder."""
    on_oom: Literal["stop", "shrink"] = parameter("shrink", EXECUTION)
    """What to do if memory runs out: `stop`, or `shrink` (halve the token budget),
    which does not change the global batch. Runs on several machines always stop."""
    deadline_hours: float | None = parameter(None, EXECUTION, MACHINE, UNTIMED, gt=0)
    """Hours until a deadline. If the run will probably end later, it logs a warning."""
    loader: LoaderSettings = parameter(LoaderSettings(), EXECUTION, MACHINE)
    checkpoint: CheckpointSettings = parameter(CheckpointSettings(), EXECUTION, UNTIMED)
    distributed: DistributedSettings = parameter(DistributedSettings(), EXECUTION)

    @field_validator("class_weights", mode="before")
    @classmethod
    def _named_by_text(cls, given: Any) -> Any:
        """Convert class names to strings. YAML reads the class 3 as a number."""
        if not isinstance(given, dict):
            return given
        return {str(name): weight for name, weight in given.items()}

    @field_validator("freeze")
    @classmethod
    def _patterns(cls, given: list[str]) -> list[str]:
        for pattern in given:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a pattern: {error}") from error
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
        """The peak learning rate, scaled from `learning_rate_at_batch` to the global
        batch size in use."""
        meant = self.learning_rate_at_batch or self.global_batch_size
        return self.learning_rate * math.sqrt(self.global_batch_size / meant)

    @model_validator(mode="after")
    def _fit_together(self) -> TrainSettings:
        if self.optimizer == "adafactor" and self.distributed.strategy == "fsdp":
            raise ValueError(
                "optimizer adafactor needs whole matrices: set "
                "distributed.strategy: ddp, or optimizer: adamw"
            )
        if self.optimizer_options and "." not in self.optimizer:
            raise ValueError(
                "optimizer_options are for an optimizer that is named by its dotted "
                f"path: for {self.optimizer} set learning_rate and weight_decay"
            )
        if self.momentum is not None and self.optimizer != "sgd":
            raise ValueError(
                f"momentum is not used by the optimizer {self.optimizer}: remove it, "
                "or set optimizer: sgd"
            )
        taken = {"lr": "learning_rate", "weight_decay": "weight_decay"}
        for name in taken.keys() & self.optimizer_options.keys():
            raise ValueError(f"optimizer_options: {name} is train.{taken[name]} here")
        if self.greater_is_better is not None and self.compute_metrics is None:
            raise ValueError(
                "greater_is_better is for a metric of compute_metrics: for the metrics "
                "of the task it is known"
            )
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                "warmup_fraction and decay_fraction add up to more than 1: lower one"
            )
        if self.early_stopping_patience and self.evaluate_every is None:
            raise ValueError(
                "early_stopping_patience needs evaluations before the end: set "
                "evaluate_every to epoch or a number of steps"
            )
        return self
