"""Parameters of the process: device, loader, checkpoints, ranks, paths, tracking and
the guard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
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
"""Waiting threads spin briefly, then yield: docs/optimisations.md#cpu-threads."""


class RuntimeSettings(SettingsModel):
    """The process and the device. `environment` is set before torch is imported."""

    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of weights, dropout and the order of rows."""
    deterministic: bool = parameter(False, EXECUTION)
    """Make results bitwise repeatable on one device; slower on a GPU."""
    precision: Precision | Auto = parameter("auto", reported="precision")
    """Compute type; weights and optimizer stay fp32. auto: bf16 if it is fast."""
    residual: Literal["auto", "fp32", "bf16"] = parameter("auto", reported="residual")
    """Type of the residual stream under bf16 autocast. auto: bf16 on a GPU."""
    tf32: bool = parameter(True, EXECUTION)
    """Compute matrix products of fp32 with 10 bits of mantissa, on NVIDIA GPUs."""
    cudnn_benchmark: bool = parameter(True, EXECUTION)
    """Let cuDNN try its kernels for each shape."""
    flash_sdp: bool = parameter(True, EXECUTION)
    """Let SDPA use its flash kernel, which does not support padding masks."""
    attention: Literal["auto", "eager", "sdpa", "varlen"] = parameter(
        "auto", EXECUTION, reported="attention"
    )
    """`eager` or `sdpa` for padded batches, `varlen` for packed ones: PyTorch's flash
    kernel. auto: the fastest installed one with the same results."""
    memory_limit_gib: float | None = parameter(None, EXECUTION, gt=0)
    """Limit of GPU memory for PyTorch, for example that of a smaller card. null: all
    that other programs leave."""
    threads: Count | Auto = parameter("auto", EXECUTION, reported="threads")
    """OMP and MKL threads. auto: 1 with a GPU, the usable cores without one."""
    environment: dict[str, str] = parameter(VARIABLES, EXECUTION)
    """Variables set before torch is imported; given ones are added to these."""

    @field_validator("environment")
    @classmethod
    def _over_the_default(cls, given: dict[str, str]) -> dict[str, str]:
        return {**VARIABLES, **given}


class LoaderSettings(SettingsModel):
    """Preparation of batches, in parallel with the training."""

    num_workers: CountOrZero | Auto = parameter("auto", reported="num_workers")
    """Processes that make batches. 0: the training process itself."""
    prefetch_factor: int = Field(2, ge=1)
    """Global batches that each worker prepares ahead."""
    pin_memory: bool = True
    """Use page-locked host memory, for copies in parallel with the compute."""
    persistent_workers: bool = True
    """Keep the workers from epoch to epoch."""
    timeout_s: float = Field(300, gt=0)
    """Longest wait for a worker's batch; a longer one is an error."""


class CheckpointSettings(SettingsModel):
    """Times at which a training is saved, to resume from there."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints. null: only by time and at an interruption."""
    every_minutes: float | None = parameter(15, MACHINE, gt=0)
    """Minutes between checkpoints; the first after one minute. null: not by time."""
    keep: int = parameter(2, MACHINE, ge=1)
    """Number of newest checkpoints kept, in addition to the best."""
    mirror: str | None = parameter(None, MACHINE)
    """URL (s3://bucket/run, or another of fsspec) for copies of the checkpoints. A new
    machine with an empty folder resumes from there. null: none."""


class DistributedSettings(SettingsModel):
    """Several devices and machines."""

    num_processes: Count | Auto = parameter("auto", MACHINE, UNTIMED)
    """Processes on this machine. auto: one per GPU; one without GPU."""
    num_machines: int = Field(1, ge=1)
    """Number of machines that train together; each runs the same command."""
    machine_rank: int = parameter(0, MACHINE, UNTIMED, ge=0)
    """Rank of this machine, 0 to `num_machines` - 1."""
    rendezvous_endpoint: str | None = parameter(None, MACHINE, UNTIMED)
    """host:port of machine 0, required if `num_machines` is over 1."""
    max_restarts: int = Field(0, ge=0)
    """Number of times that a failed job resumes from its newest checkpoint."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How ranks share the model: whole copies (ddp), or shards (fsdp)."""
    bucket_mib: Count | Literal["all"] = 25
    """MiB of gradients reduced together (ddp). all: at once, after the backward pass;
    faster with fast GPU links, because communication during matrix products uses their
    multiprocessors. Steps of CUDA graphs always reduce at once."""
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


class PathSettings(SettingsModel):
    """Files and folders of the training; no part of the model depends on them."""

    checkpoints: str = "data/06_models/checkpoints"
    """Folder of checkpoints."""
    metrics: str = "data/08_reporting/train_metrics.jsonl"
    """File with one JSON object per log point."""
    tuned: str | None = None
    """File that the benchmark writes for `--env=tuned`; null: `conf/tuned`."""
    best: str | None = None
    """File that the sweep writes for `--env=best`; null: `conf/best`."""


class TrackingSettings(SettingsModel):
    """Data that MLflow records in addition to parameters, metrics and reports."""

    log_model: bool = True
    """Log the best model, loadable with `mlflow.pyfunc`."""
    system_metrics: bool = True
    """Log the load of cores, memory, disk, network, GPUs to `system/` every 10 s."""
    registered_model: str | None = "flatout"
    """Name in the model registry. On the latest data, the setting that no other beats
    beyond noise has the alias champion."""


class GuardSettings(SettingsModel):
    """Comparison of a training's speed with the best earlier run of the same work on
    the same device."""

    enabled: bool = True
    """Compare each training with the fastest earlier one of the same work."""
    baseline: str | None = None
    """Id of a run in data/08_reporting/runs.jsonl. null: the fastest of the same work
    on the same device."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    """Percent of the baseline's samples/s; a lower rate is slow."""
    healthy_high_pct: float = Field(120, ge=100)
    """Percent of the baseline's samples/s; a higher rate is a new baseline."""
    on_slow: Literal["warn", "fail"] = "warn"
    """Effect of a slow run. `fail`: an error after all results are saved."""
    max_differences: int = Field(5, ge=1)
    """Number of differences in the log; all of them are in guard.json."""
