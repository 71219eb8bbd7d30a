"""The ladder: the slow configuration, then one optimisation after the other.

In the order of the guides that named them (A to E), then flatout's own. A rung that
loses is measured, shown, and left out of the rungs above it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.engine.bench import Bench, with_changes
from flatout.engine.environment import nvidia_gpu_count
from flatout.engine.settings import Settings
from flatout.engine.trials import TrialResult

SLOW: dict[str, Any] = {
    "runtime.precision": "fp32",
    "runtime.tf32": False,
    "runtime.cudnn_benchmark": False,
    "runtime.flash_sdp": False,
    "runtime.attention": "eager",
    "train.strategy": "fixed",
    "train.global_batch_size": 16,
    "train.compile": False,
    "train.cuda_graphs": False,
    "train.fused_optimizer": False,
    "train.log_every": 1,
    "train.metrics_every": 1,
    "train.error_analysis_every": 100,
    "train.synchronize_every_step": True,
    "train.history": "dataframe",
    "train.empty_cache_every": 1,
    "train.loader.num_workers": 0,
    "train.loader.pin_memory": False,
    "train.loader.persistent_workers": False,
}
"""conf/slow by path; a test keeps the two equal."""

KEPT_FROM = 0.98
"""A rung that makes the rate less than this share of the one below is left out."""


@dataclass(frozen=True)
class Rung:
    """One optimisation, and what its guide promised."""

    name: str
    source: str
    claim: str
    changes: Mapping[str, Any]
    gpu_only: bool = False
    changes_optimisation: bool = False


@dataclass(frozen=True)
class Step:
    """A line of benchmark_ladder.csv."""

    rung: int
    name: str
    source: str
    claim: str
    samples_per_s: float | None
    individual: float | None
    """Rate over that of the rungs kept below."""
    cumulative: float | None
    """Rate over that of the slow configuration."""
    spread_pct: float | None
    kept: bool
    changes_optimisation: bool
    status: str
    note: str
    trial_id: str


def rungs(bench: Bench) -> list[Rung]:
    """Those that apply to this device, in order."""
    train, gpu = bench.settings.train, nvidia_gpu_count() > 0
    workers = train.loader.num_workers
    fixed_batch = SLOW["train.global_batch_size"]
    all_rungs = [
        Rung(
            "history in a list, no empty_cache",
            "B",
            "not stated",
            {"train.history": "list", "train.empty_cache_every": None},
        ),
        Rung(
            "metrics, logs and synchronisation once a window",
            "A, B",
            "not stated",
            {
                "train.synchronize_every_step": False,
                "train.log_every": train.log_every,
                "train.metrics_every": train.metrics_every,
                "train.error_analysis_every": train.error_analysis_every,
            },
        ),
        Rung(
            "cudnn.benchmark",
            "A, B",
            "5-15 %",
            {"runtime.cudnn_benchmark": True},
            gpu_only=True,
        ),
        Rung(
            "TF32",
            "C",
            "2-3x with flash attention",
            {"runtime.tf32": True},
            gpu_only=True,
        ),
        Rung(
            "fused attention (SDPA)",
            "C",
            "2-3x with TF32",
            {"runtime.flash_sdp": True, "runtime.attention": "auto"},
        ),
        Rung(
            "pad to the longest of the batch",
            "C",
            "2-3x",
            {"train.strategy": "random"},
        ),
        Rung(
            "loader workers, pinned memory, prefetch, persistent",
            "A, C, D",
            "1.5-2x",
            {
                "train.loader.num_workers": workers if gpu else 1,
                "train.loader.pin_memory": True,
                "train.loader.persistent_workers": True,
            },
        ),
        Rung(
            "mixed precision (bf16)",
            "B, D",
            "1.5-2x; 20-30 %",
            {"runtime.precision": "bf16"},
            gpu_only=True,
        ),
        Rung(
            "torch.compile", "A, D", "10-30 %", {"train.compile": True}, gpu_only=True
        ),
        Rung("fused AdamW", "ours", "-", {"train.fused_optimizer": True}),
        Rung("sorted within the batch", "ours", "-", {"train.strategy": "grouped"}),
        Rung("packed: no padding", "ours", "-", {"train.strategy": "packed"}),
        Rung("CUDA graphs", "ours", "-", {"train.cuda_graphs": True}, gpu_only=True),
        *_batch_rungs(bench, fixed_batch, gpu),
    ]
    return [rung for rung in all_rungs if gpu or not rung.gpu_only]


def _batch_rungs(bench: Bench, slow_batch: int, gpu: bool) -> list[Rung]:
    """Larger global batches: another optimisation, so last and marked."""
    wanted = bench.settings.train.global_batch_size
    sizes = [wanted] if wanted > slow_batch else []
    if gpu:
        sizes += [size for size in (256, 1024) if size > max(wanted, slow_batch)]
    free: dict[str, Any] = {"train.cuda_graphs": "auto"} if gpu else {}
    return [
        Rung(
            f"global batch {size}",
            "A, E",
            "1.2-1.5x",
            {"train.global_batch_size": size, **free},
            changes_optimisation=True,
        )
        for size in sizes
    ]


def ladder(bench: Bench) -> tuple[list[Step], bool]:
    """Climb; every rung is a trial end to end. Also whether the top was reached before
    the time was up."""
    bench.run("device", label="the device's peak")
    chosen = rungs(bench)
    bench.watcher.expect(len(chosen) + 2)
    base = with_changes(bench.settings, SLOW)
    kept: dict[str, Any] = {}
    slow = bench.run("end_to_end", base=base, label="conf/slow", world_size=1)
    steps = [_step(0, Rung("conf/slow", "", "", {}), slow, slow, slow, kept=True)]
    below = slow
    for number, rung in enumerate(chosen, start=1):
        if bench.out_of_time():
            return steps, False
        trial = bench.run(
            "end_to_end",
            {**kept, **rung.changes},
            base=base,
            label=rung.name,
            world_size=1,
        )
        if trial.ok and not holds(trial, below):
            trial = _again(bench, trial, {**kept, **rung.changes}, base)
        keeps = holds(trial, below)
        steps.append(_step(number, rung, trial, below, slow, kept=keeps))
        if keeps:
            kept, below = {**kept, **rung.changes}, trial
    return steps, True


def _again(
    bench: Bench, first: TrialResult, changes: Mapping[str, Any], base: Settings
) -> TrialResult:
    """The faster of two tries: what disturbs a trial can only slow it."""
    second = bench.run(
        "end_to_end",
        changes,
        base=base,
        label=f"{first.label}, again",
        world_size=1,
        options={"again": True},
    )
    return max(first, second, key=lambda trial: trial.samples_per_s or 0.0)


def holds(trial: TrialResult, below: TrialResult) -> bool:
    """Whether a rung stays: it works, and costs no more than noise."""
    if not trial.ok or not trial.samples_per_s:
        return False
    return trial.samples_per_s >= KEPT_FROM * (below.samples_per_s or 0.0)


def _step(
    number: int,
    rung: Rung,
    trial: TrialResult,
    below: TrialResult,
    slow: TrialResult,
    *,
    kept: bool,
) -> Step:
    return Step(
        rung=number,
        name=rung.name,
        source=rung.source,
        claim=rung.claim,
        samples_per_s=trial.samples_per_s,
        individual=_ratio(trial, below),
        cumulative=_ratio(trial, slow),
        spread_pct=trial.samples_per_s_spread_pct,
        kept=kept,
        changes_optimisation=rung.changes_optimisation,
        status=trial.status,
        note=trial.note,
        trial_id=trial.trial_id,
    )


def _ratio(trial: TrialResult, other: TrialResult) -> float | None:
    if not trial.samples_per_s or not other.samples_per_s:
        return None
    return trial.samples_per_s / other.samples_per_s
