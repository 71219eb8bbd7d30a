"""Frozen results; every name includes the unit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LogPoint:
    """One line of train_history.csv: figures of the window that ends at `step`."""

    step: int
    epoch: float
    loss: float
    """Mean over the window's steps with targets; 0 without such steps."""
    learning_rate: float
    grad_norm: float
    samples_per_s: float
    tokens_per_s: float
    padded_tokens_per_s: float
    loader_wait_pct: float
    elapsed_s: float
    train_accuracy: float | None = None

    def as_metrics(self) -> dict[str, float]:
        """Metrics by their names in a tracking store, without rates of a warm-up."""
        metrics = {
            "train_samples_per_second": self.samples_per_s,
            "train_tokens_per_second": self.tokens_per_s,
            "train_loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "loader_wait_pct": self.loader_wait_pct,
        }
        if self.train_accuracy is not None:
            metrics["train_accuracy"] = self.train_accuracy
        return {name: v for name, v in metrics.items() if not math.isnan(v)}


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over all targets of a split, and the task's metrics."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Task metrics by name; `accuracy` is in [0, 1]."""

    def named(self, split: str) -> dict[str, float]:
        """Loss and metrics as `<split>_loss`, `<split>_accuracy`."""
        figures = {"loss": self.loss, **self.metrics}
        return {f"{split}_{name}": value for name, value in figures.items()}

    def value(self, metric: str | None) -> float:
        """Value of a metric by its name, or of the loss (None); NaN if missing."""
        named = {"loss": self.loss, **self.metrics}
        return named.get(metric or "loss", math.nan)

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions; None for tasks without right and wrong."""
        return self.metrics.get("accuracy")


@dataclass(frozen=True)
class TrainReport:
    """Results of a training run. Rates are global, over all ranks, between two
    synchronisations, including loader wait, without warm-up and compilation."""

    samples_per_s: float
    tokens_per_s: float
    padded_tokens_per_s: float
    padding_pct: float
    loader_wait_pct: float
    mfu_pct: float | None
    """Share of the peak in the device's data sheet: dense bf16, 989.5 TFLOP/s for an
    H100 or H200 (`PEAK_BF16_TFLOPS`); None for an unknown device."""
    tflops_per_s: float
    """Model FLOPs per second and device, as defined in flops.py."""
    step_ms_p50: float
    step_ms_p90: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    allocation_retries: int
    compile_s: float
    recompiles: int
    """Compilations, and captures of CUDA graphs, after the first step."""
    first_batch_s: float
    evaluate_s: float
    checkpoint_s: float
    train_wall_s: float
    samples: int
    """Samples trained on in this session."""
    steps: int
    """Total number of steps, including those before a resume."""
    epochs: float
    world_size: int
    global_batch_size: int
    token_budget: int
    strategy: str
    precision: str
    residual: str
    """Type of blocks' outputs: bf16 or fp32."""
    attention: str
    compile: bool
    cuda_graphs: bool
    num_workers: int
    device: str
    threads: int
    parameters: int
    initial_loss: float
    final_loss: float
    chance_loss: float | None
    validation_loss: float
    validation_accuracy: float | None
    test_loss: float
    test_accuracy: float | None
    resumed_from_step: int | None
    compile_reason: str = ""
    """Reason for `compile` and `cuda_graphs`, with the estimated seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    """All task metrics, such as `validation_f1_macro` of the best model."""
    cpu_wait_pct: float | None = None
    """Share of wall time in which the training thread was ready but had no core."""
    gpu_clock_mhz: float | None = None
    """Median clock of the main rank's device, at log points."""
    peak_tflops_measured: float | None = None
    """Rate of large products in the run's precision on this GPU, after training."""
    share_of_measured_peak_pct: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    """Parts of `train_wall_s`, which add up to it. In the file of a whole command the
    parts of its total time, since the process began."""
    exit_reason: str = "finished"
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Fields of the report's file, with each of `metrics` under its own name."""
        found = asdict(self)
        return {**found.pop("metrics"), **found}
