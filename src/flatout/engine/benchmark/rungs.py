"""The rungs of the ladder: the requests of each guide, and the gains it promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.parameters import Settings, TrainSettings

SLOW: dict[str, Any] = {
    "runtime.precision": "fp32",
    "runtime.residual": "fp32",
    "runtime.tf32": False,
    "runtime.cudnn_benchmark": False,
    "runtime.flash_sdp": False,
    "runtime.attention": "eager",
    "train.batching": "fixed",
    "train.global_batch_size": 16,
    "train.compile": False,
    "train.cuda_graphs": False,
    "train.fused_optimizer": False,
    "train.log_every": 1,
    "train.metrics_every": 1,
    "train.synchronize_every_step": True,
    "train.history": "dataframe",
    "train.empty_cache_every": 1,
    "train.loader.num_workers": 0,
    "train.loader.pin_memory": False,
    "train.loader.persistent_workers": False,
}
"""conf/slow by path; a test keeps the two equal."""


@dataclass(frozen=True)
class Rung:
    """One optimisation, and the gain that its guide promised."""

    name: str
    source: str
    claim: str
    changes: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Changes that it requires, added if a rung below was left out."""
    gpu_only: bool = False
    changes_optimisation: bool = False


def rungs(settings: Settings) -> list[Rung]:
    """Return the rungs that apply to this device and these rows, in order: samples of
    one shape have no padding to avoid."""
    gpu = nvidia_gpu_count() > 0
    found = [
        *_guides_rungs(settings.train, gpu),
        *_own_rungs(gpu),
        *_batch_rungs(settings, SLOW["train.global_batch_size"], gpu),
    ]
    cut = settings.train.rows == "tokens"
    return [
        rung
        for rung in found
        if (gpu or not rung.gpu_only) and (cut or "train.batching" not in rung.changes)
    ]


def _guides_rungs(train: TrainSettings, gpu: bool) -> list[Rung]:
    """Return the optimisations that guides A to E request, in their order."""
    workers = train.loader.num_workers if gpu else 1
    return [
        Rung(
            "history in a list, no empty_cache",
            "B",
            "10-100x",
            {"train.history": "list", "train.empty_cache_every": None},
        ),
        Rung(
            "metrics, logs and synchronisation once a window",
            "A, B",
            "-90 % for metrics",
            {
                "train.synchronize_every_step": False,
                "train.log_every": train.log_every,
                "train.metrics_every": train.metrics_every,
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
            {"train.batching": "random"},
        ),
        Rung(
            "loader workers, pinned memory, prefetch, persistent",
            "A, C, D",
            "1.5-2x",
            {
                "train.loader.num_workers": workers,
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
    ]


def _own_rungs(gpu: bool) -> list[Rung]:
    # Packing uses its own kernels, so the result of fused attention for padded batches
    # does not apply to it. On a GPU they require half precision.
    packed = {"train.batching": "packed", "runtime.attention": "auto"}
    half = {"runtime.precision": "bf16"}
    return [
        Rung("fused AdamW", "ours", "-", {"train.fused_optimizer": True}),
        Rung("sorted within the batch", "ours", "-", {"train.batching": "grouped"}),
        Rung(
            "packed: no padding",
            "ours",
            "-",
            packed,
            needs=half if gpu else {},
        ),
        Rung(
            "residual stream in bf16",
            "ours",
            "-",
            {"runtime.residual": "bf16"},
            # Its kernels exist only in compiled blocks.
            needs={**half, "train.compile": True},
            gpu_only=True,
        ),
        Rung(
            "CUDA graphs",
            "ours",
            "-",
            {"train.cuda_graphs": True},
            needs={**half, **packed, "train.fused_optimizer": True},
            gpu_only=True,
        ),
    ]


def _batch_rungs(settings: Settings, slow_batch: int, gpu: bool) -> list[Rung]:
    """Return larger global batches: another optimisation, so last and marked."""
    wanted = settings.train.global_batch_size
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
