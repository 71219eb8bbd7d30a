"""Find the bottleneck of a step, and recommend the next change to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.engine.benchmark.trials.trial_spec import TrialResult

Bound = Literal["loader", "launch", "memory", "compute", "communication", "unknown"]

IO_LIMIT_SHARE = 0.1
"""The loader is the bottleneck if steps wait for batches for this fraction of time."""
GPU_UTIL_LIMIT_PCT = 70.0
"""Below this GPU utilisation, the batch is too small or I/O is the bottleneck."""
MEMORY_FULL_PCT = 90.0
LAUNCH_SHARE = 0.9
"""If kernel launches take this fraction of a step, the device waits for the host."""
SCALING_LIMIT = 0.9
"""Below this fraction of linear scaling, gradient exchange is the bottleneck."""


@dataclass(frozen=True)
class Verdict:
    bound: Bound
    because: str
    """The metrics that show the bottleneck."""
    advice: str
    """The next change to try."""


def judge(
    trial: TrialResult,
    *,
    memory_gib: float | None = None,
    single: TrialResult | None = None,
    tried: Sequence[TrialResult] = (),
) -> Verdict:
    """Return the bottleneck of `trial` and the next change to try. `memory_gib` is the
    memory of the device. If `trial` ran on several devices, `single` is a trial of the
    same settings on one device. The settings of the slower trials `tried` are not
    recommended again."""
    return (
        _communication(trial, single)
        or _loader(trial, tried)
        or _launch(trial)
        or _memory(trial, memory_gib)
        or _compute(trial, tried)
    )


def _communication(trial: TrialResult, single: TrialResult | None) -> Verdict | None:
    if trial.world_size < 2 or single is None or not (trial.rate and single.rate):
        return None
    share = trial.rate / (trial.world_size * single.rate)
    if share >= SCALING_LIMIT:
        return None
    because = (
        f"{trial.world_size} devices give {share * trial.world_size:.2f} times the "
        f"rate of one, {100 * share:.0f} % of linear"
    )
    advice = (
        "give each device more tokens between two all-reduces: a larger "
        "train.global_batch_size, or fewer devices"
    )
    return Verdict("communication", because, advice)


def _loader(trial: TrialResult, tried: Sequence[TrialResult]) -> Verdict | None:
    if trial.io_ms is None or not trial.total_ms:
        return None
    share = trial.io_ms / trial.total_ms
    if share < IO_LIMIT_SHARE:
        return None
    because = (
        f"a step of {trial.total_ms:.1f} ms waits {trial.io_ms:.1f} ms for its batch "
        f"({100 * share:.0f} %) with {trial.num_workers} workers"
    )
    advice = "more train.loader.num_workers, or benchmark.profile: true to see why"
    mine = trial.num_workers
    counts = (t.num_workers for t in tried if t.ok and t.kind == "end_to_end")
    if isinstance(mine, int) and any(isinstance(n, int) and n > mine for n in counts):
        advice = "benchmark.profile: true, to see why; more workers were slower here"
    return Verdict("loader", because, advice)


def _launch(trial: TrialResult) -> Verdict | None:
    host = trial.host_ms is not None and trial.total_ms
    if host and (trial.host_ms or 0.0) >= LAUNCH_SHARE * (trial.total_ms or 0.0):
        because = (
            f"the host needs {trial.host_ms:.1f} ms to launch a step of "
            f"{trial.total_ms:.1f} ms"
        )
    elif trial.gpu_util_pct is not None and trial.gpu_util_pct < GPU_UTIL_LIMIT_PCT:
        because = f"the GPU is busy {trial.gpu_util_pct:.0f} % of the time"
    else:
        return None
    if trial.cuda_graphs is True:
        advice = "a larger train.global_batch_size: the graph itself is short"
    else:
        advice = "train.cuda_graphs: true (packed), or train.compile: true"
    return Verdict("launch", because, advice)


def _memory(trial: TrialResult, memory_gib: float | None) -> Verdict | None:
    used = trial.reserved_memory_gib
    if trial.status == "oom":
        because = trial.note or "out of memory"
    elif memory_gib and used and 100 * used / memory_gib > MEMORY_FULL_PCT:
        because = f"{100 * used / memory_gib:.0f} % of {memory_gib:.0f} GiB are used"
    else:
        return None
    advice = "a smaller train.token_budget (the global batch stays)"
    if not trial.gradient_checkpointing:
        advice += "; if one row is too large, train.gradient_checkpointing: true"
    return Verdict("memory", because, advice)


def _compute(trial: TrialResult, tried: Sequence[TrialResult]) -> Verdict:
    if not trial.ok or not trial.total_ms:
        advice = "see its log" if trial.log else "other settings: these were refused"
        if trial.status == "timeout":
            advice = "a larger benchmark.trial_timeout_s"
        return Verdict("unknown", trial.note or "not measured", advice)
    parts = []
    if trial.io_ms is not None:
        parts.append(f"waits {100 * trial.io_ms / trial.total_ms:.0f} % for batches")
    if trial.mfu_pct is not None:
        parts.append(f"{trial.mfu_pct:.0f} % of the data sheet's peak")
    if trial.gpu_util_pct is not None:
        parts.append(f"GPU busy {trial.gpu_util_pct:.0f} %")
    if trial.padding_pct:
        parts.append(f"{trial.padding_pct:.0f} % of the tokens are padding")
    packing_lost = any(other.ok and other.strategy == "packed" for other in tried)
    if (trial.padding_pct or 0.0) > 10.0 and not packing_lost:
        advice = "train.batching: packed (or grouped): padding is computed too"
    elif trial.precision == "fp32":
        advice = "runtime.precision: bf16 if the device is fast at it, or more devices"
    else:
        advice = "more devices, or a smaller model"
    return Verdict("compute", ", ".join(parts), advice)
