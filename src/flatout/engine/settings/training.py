"""The process, the model and its training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from flatout.engine.settings.common import (
    Auto,
    Count,
    CountOrZero,
    Precision,
    SettingsModel,
    Strategy,
    Task,
)


class RuntimeSettings(SettingsModel):
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


class ModelSettings(SettingsModel):
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


class LoaderSettings(SettingsModel):
    num_workers: CountOrZero | Auto = "auto"
    prefetch_factor: int = Field(2, ge=1)
    """Global batches that each worker prepares ahead."""
    pin_memory: bool = True
    persistent_workers: bool = True
    timeout_s: float = Field(300, gt=0)
    """A worker that gives nothing for so long is an error."""


class CheckpointSettings(SettingsModel):
    every_steps: int | None = Field(None, ge=1)
    """null: no checkpoint inside the run but those by time and at an interruption."""
    every_minutes: float | None = Field(15, gt=0)
    keep: int = Field(2, ge=1)


class DistributedSettings(SettingsModel):
    num_processes: Count | Auto = "auto"
    """Processes on this machine. auto: one a GPU; one without GPU."""
    num_machines: int = Field(1, ge=1)
    machine_rank: int = Field(0, ge=0)
    rendezvous_endpoint: str | None = None
    """host:port of machine 0, where `num_machines` is over 1."""
    max_restarts: int = Field(0, ge=0)
    strategy: Literal["ddp", "fsdp"] = "ddp"
    bucket_mib: Count | Literal["all"] = 25
    """Gradients that travel together (ddp). all: at once, behind the backward pass;
    quicker where GPUs are linked well, because what travels beside matrix products
    takes their multiprocessors. Steps of CUDA graphs do it at once in any case."""
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


class TrainSettings(SettingsModel):
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


class PathSettings(SettingsModel):
    """Where training works; no part of what is trained."""

    checkpoints: str = "data/06_models/checkpoints"
    """Folder."""
    metrics: str = "data/08_reporting/train_metrics.jsonl"
    """File, one JSON object a log point."""
