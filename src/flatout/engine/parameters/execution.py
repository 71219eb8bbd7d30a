"""Parameters of the training process: device, loader, checkpoints, ranks, paths,
tracking and guard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    PATH,
    UNTIMED,
    Auto,
    Count,
    CountOrZero,
    Precision,
    SettingsModel,
    parameter,
)

VARIABLES = {
    "MKL_SERVICE_FORCE_INTEL": "1",
    "MKL_THREADING_LAYER": "GNU",
    "TOKENIZERS_PARALLELISM": "false",
    "GOMP_SPINCOUNT": "10000",
}
"""Default environment variables. With GOMP_SPINCOUNT, waiting threads spin only briefly
before they yield (see docs/optimisations.md#cpu-threads)."""


class RuntimeSettings(SettingsModel):
    """Settings of the training process and its device."""

    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of the weight initialisation, dropout and the order of the rows."""
    deterministic: bool = parameter(False, EXECUTION)
    """Make results on one device reproducible bit for bit. This is slower on a GPU."""
    precision: Precision | Auto = parameter("auto", reported="precision")
    """Compute dtype. Weights and optimizer state stay in fp32. `auto` uses bf16 on
    devices where it is fast."""
    residual: Literal["auto", "fp32", "bf16"] = parameter("auto", reported="residual")
    """Dtype of the residual stream under bf16 autocast. `auto` uses bf16 on a GPU."""
    tf32: bool = parameter(True, EXECUTION)
    """Use TF32 (a 10-bit mantissa) for fp32 matrix multiplications on NVIDIA GPUs."""
    cudnn_benchmark: bool = parameter(False, EXECUTION)
    """Let cuDNN benchmark its kernels and choose the fastest one for each shape. For
    ResNet-50, this takes 5 to 23 s and then makes steps 1 % faster."""
    flash_sdp: bool = parameter(True, EXECUTION)
    """Let SDPA use its flash kernel, which does not support padding masks."""
    attention: Literal["auto", "eager", "sdpa", "varlen"] = parameter(
        "auto", EXECUTION, reported="attention"
    )
    """Attention kernel: `eager` or `sdpa` for padded batches, `varlen` (PyTorch's flash
    kernel) for packed batches. `auto` uses the fastest kernel that gives the same
    results."""
    memory_limit_gib: float | None = parameter(None, EXECUTION, gt=0)
    """Limit on the GPU memory used by PyTorch, for example to simulate a smaller GPU.
    If null, all memory that other programs leave free can be used."""
    threads: Count | Auto = parameter("auto", EXECUTION, reported="threads")
    """Number of OpenMP and MKL threads per process. `auto` is 1 with a GPU. Without a
    GPU, the usable cores are divided among the processes."""
    environment: dict[str, str] = parameter(VARIABLES, EXECUTION)
    """Environment variables to set before torch is imported, in addition to the
    defaults."""

    @field_validator("environment")
    @classmethod
    def _over_the_default(cls, given: dict[str, str]) -> dict[str, str]:
        return {**VARIABLES, **given}


class LoaderSettings(SettingsModel):
    """Preparation of batches in parallel with training."""

    num_workers: CountOrZero | Auto = parameter("auto", reported="num_workers")
    """Number of processes to build batches. If 0, the training process builds them."""
    prefetch_factor: int = Field(2, ge=1)
    """Number of global batches that each worker prepares in advance."""
    pin_memory: bool = True
    """Use page-locked host memory, so that GPU copies overlap with computation."""
    persistent_workers: bool = True
    """Keep the workers alive between epochs."""
    timeout_s: float = Field(300, gt=0)
    """Maximum time in seconds to wait for a worker's batch before raising an error."""


class CheckpointSettings(SettingsModel):
    """When and where to save checkpoints, from which a run can resume."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints. If null, only `every_minutes` and interruptions
    trigger a checkpoint."""
    every_minutes: float | None = parameter(15, MACHINE, gt=0)
    """Minutes between checkpoints. The first checkpoint is saved after one minute. If
    null, no checkpoint is triggered by time."""
    keep: int = parameter(2, MACHINE, ge=1)
    """Number of most recent checkpoints to keep, in addition to the best one."""
    mirror: str | None = parameter(None, MACHINE)
    """URL to which checkpoints are copied, such as s3://bucket/run or any other URL
    that fsspec supports. A new machine with an empty folder resumes from this URL."""


class DistributedSettings(SettingsModel):
    """Training on several devices and machines."""

    num_processes: Count | Auto = parameter("auto", MACHINE, UNTIMED)
    """Number of processes on this machine. `auto` uses one per GPU, or one without a
    GPU."""
    num_machines: int = Field(1, ge=1)
    """Number of machines that train together. Each of them runs the same command."""
    machine_rank: int = parameter(0, MACHINE, UNTIMED, ge=0)
    """Rank of this machine, from 0 to `num_machines` - 1."""
    rendezvous_endpoint: str | None = parameter(None, MACHINE, UNTIMED)
    """host:port of machine 0. Required if `num_machines` is greater than 1."""
    max_restarts: int = Field(0, ge=0)
    """Maximum number of times to resume a failed job from its newest checkpoint."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Whether each rank has the whole model (`ddp`) or a shard of it (`fsdp`)."""
    bucket_mib: Count | Literal["all"] = 25
    """MiB of gradients that are all-reduced together (ddp). `all` reduces all gradients
    after the backward pass, as CUDA graphs always do. With fast GPU links, `all` is
    faster, because overlapping communication takes multiprocessors away from matrix
    multiplications."""
    timeout_s: float = Field(600, gt=0)
    """Seconds that a collective operation may take before the job is aborted."""
    heartbeat_timeout_s: float = parameter(300, MACHINE, gt=0)
    """Number of seconds without a step after which a rank is considered to hang."""

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


class PathSettings(SettingsModel):
    """Files and folders of a training run. Their paths do not affect the model."""

    checkpoints: str = parameter("data/06_models/checkpoints", PATH)
    """Folder for checkpoints."""
    metrics: str = parameter("data/08_reporting/train_metrics.jsonl", PATH)
    """File to which each logging step appends a JSON object."""
    tuned: str | None = parameter(None, PATH)
    """File that the benchmark writes for `--env=tuned`. If null, it is `conf/tuned`."""
    best: str | None = parameter(None, PATH)
    """File that the sweep writes for `--env=best`. If null, it is `conf/best`."""


class TrackingSettings(SettingsModel):
    """Data that MLflow records in addition to parameters, metrics and reports."""

    log_model: bool = True
    """Log the best model, so that `mlflow.pyfunc` can load it."""
    system_metrics: bool = True
    """Log CPU, memory, disk, network and GPU usage as `system/` metrics every 10 s."""
    registered_model: str | None = "flatout"
    """Name of the model in the registry. The alias `champion` marks the version with
    the best settings: on the latest data, no other settings are better by more than
    noise."""


class GuardSettings(SettingsModel):
    """Settings of the guard, which compares the throughput of a run with that of the
    fastest earlier run of the same workload on the same device (the baseline)."""

    enabled: bool = True
    """Compare each run's throughput with that of the baseline, the fastest earlier run
    of the same workload."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    """Percentage of the baseline's samples/s below which a run is reported as slow."""
    on_slow: Literal["warn", "fail"] = "warn"
    """What to do after a slow run. `warn` logs a warning. `fail` raises an error, after
    all results have been saved."""
