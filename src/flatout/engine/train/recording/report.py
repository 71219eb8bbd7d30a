"""The results of a run, as frozen dataclasses. Names of quantities include the unit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LogPoint:
    """A row of train_history.csv: metrics of the steps since the previous row."""

    step: int
    epoch: float
    loss: float
    """The mean loss of all steps with targets, or 0 if no step had a target."""
    learning_rate: float
    grad_norm: float
    samples_per_s: float
    tokens_per_s: float
    padded_tokens_per_s: float
    loader_wait_pct: float
    elapsed_s: float
    train_accuracy: float | None = None

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics by the names used in a tracking store. Values that are
        NaN, such as the throughput during the warm-up, are left out."""
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
    """The mean loss over all targets of a split, and further metrics."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The task's metrics by name. `accuracy` is in [0, 1]."""

    def named(self, split: str) -> dict[str, float]:
        """Return the loss and the metrics, with names such as `<split>_loss`."""
        figures = {"loss": self.loss, **self.metrics}
        return {f"{split}_{name}": value for name, value in figures.items()}

    def value(self, metric: str | None) -> float:
        """Return the value of `metric`, or the loss if `metric` is None. If there is no
        such metric, return NaN."""
        named = {"loss": self.loss, **self.metrics}
        return named.get(metric or "loss", math.nan)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions, or None if the task has no accuracy."""
        return self.metrics.get("accuracy")


@dataclass(frozen=True)
class TrainReport:
    """The results of a training session. Throughput is summed over all ranks and
    measured between device synchronisations. It includes the time spent waiting for the
    loader, but neither warm-up nor compilation."""

    samples_per_s: float
    tokens_per_s: float
    padded_tokens_per_s: float
    padding_pct: float
    loader_wait_pct: float
    mfu_pct: float | None
    """`tflops_per_s` as a percentage of the dense bf16 peak in the data sheet, e.g.
    989.5 TFLOP/s for an H100 or H200. It is None if the peak is unknown
    (`PEAK_BF16_TFLOPS`)."""
    tflops_per_s: float
    """The model's TFLOP/s per device. flops.py defines which operations are counted."""
    step_ms_p50: float
    step_ms_p90: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    allocation_retries: int
    compile_s: float
    recompiles: int
    """The number of compilations and CUDA graph captures after the first step."""
    first_batch_s: float
    evaluate_s: float
    checkpoint_s: float
    train_wall_s: float
    samples: int
    """The number of samples in the steps of this session."""
    steps: int
    """The number of steps of the run, including those of earlier sessions."""
    epochs: float
    world_size: int
    global_batch_size: int
    token_budget: int
    strategy: str
    precision: str
    residual: str
    """The dtype of the residual stream between blocks: bf16 or fp32."""
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
    """Why `compile` and `cuda_graphs` are on or off, with the estimated times."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The best model's metrics on the validation and test split, e.g.
    `validation_f1_macro`."""
    cpu_wait_pct: float | None = None
    """The percentage of time for which the training thread waited for a core."""
    gpu_clock_mhz: float | None = None
    """The median clock rate of the main rank's GPU at logging steps."""
    peak_tflops_measured: float | None = None
    """The throughput of large matmuls on this GPU in the run's precision, measured
    after training."""
    share_of_measured_peak_pct: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    """The time in seconds of each phase. Together, they add up to `train_wall_s`. In
    the report of a whole command, they add up to the time since its process started."""
    exit_reason: str = "finished"
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the report file. Each entry of `metrics` has its own
        key."""
        found = asdict(self)
        return {**found.pop("metrics"), **found}
