"""Set up the device, precision, PyTorch's global options, memory limits and seeds."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from flatout.engine.machine.environment import (
    Ranks,
    allocator_is_set,
    c_compiler,
    cpu_name,
    current_ranks,
    resolve_threads,
)
from flatout.engine.machine.garbage import keep_freed_memory
from flatout.engine.parameters import RuntimeSettings, SettingsError

logger = logging.getLogger(__name__)

CPU_BF16_PAD_MULTIPLE = 64
"""The multiple to which packed token counts are rounded up in bf16 on a CPU. oneDNN
takes 0.5 ms to compile each new shape, and its cache has room for 1,024 shapes. Without
rounding, 240 steps had 9,085 shapes."""
PADDED_MULTIPLE = 8
"""The multiple to which padded row lengths are rounded up, except in fp32 on a CPU."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """The device and settings of this process, with all `auto` values resolved."""

    device: torch.device
    device_name: str
    precision: str
    ranks: Ranks
    threads: int
    deterministic: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        """Return an autocast context for the compute dtype. Parameters stay in fp32."""
        enabled = self.precision != "fp32"
        dtype = self.compute_dtype if enabled else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)

    @property
    def device_memory_bytes(self) -> int | None:
        """The GPU memory in bytes that this process may use, or None without a GPU."""
        if not (self.is_cuda and torch.cuda.is_available()):
            return None
        whole = int(torch.cuda.mem_get_info(self.device)[1])
        return int(torch.cuda.get_per_process_memory_fraction(self.device) * whole)

    @property
    def memory_within_reach(self) -> int:
        """The GPU memory in bytes that this process has reserved or can still allocate,
        excluding the memory that other programs use."""
        held = torch.cuda.memory_reserved(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(held + free, self.device_memory_bytes or 0)

    def pad_multiple(self, packed: bool, packed_on_gpu: int) -> int:
        """Return the multiple to which the token counts of packed batches, or the row
        lengths of padded batches, are rounded up to limit the number of distinct
        shapes. It is `packed_on_gpu` for packed batches on a GPU, and 1 in fp32 on a
        CPU, where rounding has no benefit."""
        if not self.is_cuda and self.precision == "fp32":
            return 1
        packed_multiple = packed_on_gpu if self.is_cuda else CPU_BF16_PAD_MULTIPLE
        return packed_multiple if packed else PADDED_MULTIPLE

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def set_up(settings: RuntimeSettings) -> Runtime:
    """Choose the device and precision, set PyTorch's options and seed the generators.
    Raises SettingsError if the device does not support the precision."""
    ranks = current_ranks()
    device = _device(ranks)
    precision = _precision(settings.precision, device)
    threads = resolve_threads(settings, ranks.local_world_size)
    torch.set_num_threads(threads)
    _switches(settings)
    _limit_memory(settings.memory_limit_gib, device)
    if device.type == "cpu":
        keep_freed_memory()
    seed_all(settings.seed + ranks.rank)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return Runtime(device, name, precision, ranks, threads, settings.deterministic)


def _device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def _precision(wanted: str, device: torch.device) -> str:
    if wanted == "auto":
        return "bf16" if fast_bf16(device) else "fp32"
    if (
        wanted == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported()
    ):
        raise SettingsError(
            f"runtime.precision: {torch.cuda.get_device_name(device)} has no bf16; "
            "set fp16 or fp32"
        )
    if wanted == "fp16" and device.type == "cpu":
        raise SettingsError("runtime.precision: fp16 needs a GPU; set fp32 (or auto)")
    return wanted


def fast_bf16(device: torch.device) -> bool:
    """Return whether the GPU (Ampere or newer) or CPU (AMX, AVX-512) has fast bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return bool(
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


def has_triton() -> bool:
    """Return whether Triton and a C compiler are installed."""
    return find_spec("triton") is not None and c_compiler() is not None


def _switches(settings: RuntimeSettings) -> None:
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.backends.cudnn.benchmark = (
        settings.cudnn_benchmark and not settings.deterministic
    )
    torch.backends.cuda.enable_flash_sdp(settings.flash_sdp)
    wanted = settings.deterministic
    if wanted or torch.are_deterministic_algorithms_enabled():
        # This imports all of TorchInductor, which takes seconds. Skip it if possible.
        torch.use_deterministic_algorithms(wanted, warn_only=True)


def _limit_memory(limit_gib: float | None, device: torch.device) -> None:
    """Limit PyTorch to `limit_gib` of GPU memory, to emulate a GPU with less memory."""
    if limit_gib is None or device.type != "cuda":
        return
    whole_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    if limit_gib > whole_gib:
        logger.warning(
            "runtime.memory_limit_gib: %s has %.1f GiB, not %g: all of it is used",
            torch.cuda.get_device_name(device),
            whole_gib,
            limit_gib,
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib / whole_gib), device)


def let_segments_grow() -> None:
    """Enable expandable segments in the CUDA allocator, which reduce fragmentation. Do
    nothing if the user has configured the allocator."""
    if not allocator_is_set():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def memory(runtime: Runtime) -> dict[str, Any]:
    """Return the peak memory of this rank in GiB. On a GPU, the values come from the
    allocator. On a CPU, the value is the peak resident set size of the process."""
    if runtime.is_cuda:
        stats = torch.cuda.memory_stats(runtime.device)
        return {
            "peak_allocated_gib": stats["allocated_bytes.all.peak"] / 2**30,
            "peak_reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
            "allocation_retries": stats["num_alloc_retries"],
        }
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # Linux reports KiB
    peak_gib = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    return {
        "peak_allocated_gib": peak_gib,
        "peak_reserved_gib": peak_gib,
        "allocation_retries": 0,
    }


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch (on all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def exact_products() -> Iterator[None]:
    """Context manager that disables TF32 for matrix multiplications in fp32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
