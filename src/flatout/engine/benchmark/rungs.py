"""The rungs of the ladder: common tips, followed by flatout's own optimisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.parameters import Settings, TrainSettings
from flatout.engine.rows import row_kind

BATCH = "train.global_batch_size"
SLOW: dict[str, Any] = {
    "runtime.precision": "fp32",
    "runtime.residual": "fp32",
    "runtime.tf32": False,
    "runtime.cudnn_benchmark": False,
    "runtime.flash_sdp": False,
    "runtime.attention": "eager",
    "train.batching": "fixed",
    BATCH: 16,
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
"""The settings of conf/slow by path. A test checks that they match the file."""


@dataclass(frozen=True)
class Rung:
    """An optimisation on the ladder."""

    name: str
    changes: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Changes that this rung requires. They are added to `changes` if the earlier rung
    with them was left out."""
    gpu_only: bool = False
    changes_optimisation: bool = False


def rungs(settings: Settings) -> list[Rung]:
    """Return the rungs that apply to this device and data, in order. Rungs about
    batching are left out if all samples have the same shape and need no padding."""
    gpu = nvidia_gpu_count() > 0
    found = [
        *_common_rungs(settings.train, gpu),
        *_own_rungs(gpu),
        *_batch_rungs(settings, SLOW[BATCH], gpu),
    ]
    cut = not row_kind(settings.train.rows).one_shape
    return [
        rung
        for rung in found
        if (gpu or not rung.gpu_only) and (cut or "train.batching" not in rung.changes)
    ]


def _common_rungs(train: TrainSettings, gpu: bool) -> list[Rung]:
    """Return the common tips, in the order of the guides that recommend them."""
    rarely = {
        "train.synchronize_every_step": False,
        "train.log_every": train.log_every,
        "train.metrics_every": train.metrics_every,
    }
    loader = {
        "train.loader.num_workers": train.loader.num_workers if gpu else 1,
        "train.loader.pin_memory": True,
        "train.loader.persistent_workers": True,
    }
    listed = {"train.history": "list", "train.empty_cache_every": None}
    fused = {"runtime.flash_sdp": True, "runtime.attention": "auto"}
    half = {"runtime.precision": "bf16"}
    return [
        Rung("history in a list, no empty_cache", listed),
        Rung("metrics, logs and synchronisation once a window", rarely),
        Rung("cudnn.benchmark", {"runtime.cudnn_benchmark": True}, gpu_only=True),
        Rung("TF32", {"runtime.tf32": True}, gpu_only=True),
        Rung("fused attention (SDPA)", fused),
        Rung("pad to the longest of the batch", {"train.batching": "random"}),
        Rung("loader workers, pinned memory, prefetch, persistent", loader),
        Rung("mixed precision (bf16)", half, gpu_only=True),
        Rung("torch.compile", {"train.compile": True}, gpu_only=True),
    ]


def _own_rungs(gpu: bool) -> list[Rung]:
    # Packed batches use other attention kernels, so this rung adds fused attention even
    # if it made padded batches slower. On a GPU, these kernels require half precision.
    packed = {"train.batching": "packed", "runtime.attention": "auto"}
    half = {"runtime.precision": "bf16"}
    fused = {"train.fused_optimizer": True}
    # A bf16 residual stream needs the kernels of compiled blocks.
    compiled = {**half, "train.compile": True}
    residual = {"runtime.residual": "bf16"}
    graphs = {"train.cuda_graphs": True}
    needed = {**half, **packed, **fused}
    return [
        Rung("fused AdamW", fused),
        Rung("sorted within the batch", {"train.batching": "grouped"}),
        Rung("packed: no padding", packed, needs=half if gpu else {}),
        Rung("residual stream in bf16", residual, needs=compiled, gpu_only=True),
        Rung("CUDA graphs", graphs, needs=needed, gpu_only=True),
    ]


def _batch_rungs(settings: Settings, slow_batch: int, gpu: bool) -> list[Rung]:
    """Return rungs with larger global batches, which change the optimisation."""
    wanted = settings.train.global_batch_size
    sizes = [wanted] if wanted > slow_batch else []
    if gpu:
        sizes += [size for size in (256, 1024) if size > max(wanted, slow_batch)]
    free: dict[str, Any] = {"train.cuda_graphs": "auto"} if gpu else {}
    return [
        Rung(f"global batch {size}", {BATCH: size, **free}, changes_optimisation=True)
        for size in sizes
    ]
