"""GPU, driver and what PyTorch can do with them."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from flatout.engine.diagnosis.finding import Finding
from flatout.engine.diagnosis.machine import gib
from flatout.engine.machine import environment
from flatout.engine.parameters import RuntimeSettings, Settings

NO_GPU = "no GPU: not needed"
HELD_BYTES = 2**30
"""More than the driver and a desktop hold of an idle GPU."""
COMPILERS = ("g++", "gcc", "clang++", "clang")
FLASH4_ROWS, FLASH4_GPUS = 512, (9, 10)
"""From more tokens a row on FlashAttention 4 gains, on these major capabilities."""
FLASH4_PAGE = "docs/optimisations.md#attention-of-long-rows says how to install it"


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says, without CUDA."""

    version: str
    cuda: tuple[int, int]
    """Newest CUDA it runs."""
    gpus: tuple[tuple[str, int], ...]
    """Name and bytes of each."""
    used_bytes: tuple[int, ...] = ()
    """Of each, by whatever programs."""
    programs: tuple[tuple[int, ...], ...] = ()
    """Process ids that compute on each."""


@dataclass(frozen=True)
class Torch:
    """What PyTorch says."""

    version: str
    cuda: str | None
    """CUDA it was built for; None: for CPUs alone."""
    gpus: int
    """That it can use."""
    capability: tuple[int, int] | None
    fast_bf16: bool
    flash: bool
    nccl: str | None
    compilers: tuple[str, ...]
    triton: bool


def look_at_driver() -> Driver | None:
    """None where no driver answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    return Driver(
        version=str(pynvml.nvmlSystemGetDriverVersion()),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(
            (
                str(pynvml.nvmlDeviceGetName(handle)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        ),
        used_bytes=tuple(
            int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles
        ),
        programs=tuple(_programs(handle) for handle in handles),
    )


def _programs(handle: Any) -> tuple[int, ...]:
    import pynvml

    with suppress(pynvml.NVMLError):  # a container may not be told
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return tuple(sorted(int(process.pid) for process in found))
    return ()


def gpu_neighbours(driver: Driver | None) -> Finding:
    """What other programs hold of the GPUs; before this one has used any."""
    if driver is None or not driver.used_bytes:
        return Finding("GPU memory", "ok", NO_GPU)
    held = [
        f"GPU {index}: {gib(used)} of {gib(driver.gpus[index][1])} are held{_by(pids)}"
        for index, (used, pids) in enumerate(
            zip(driver.used_bytes, driver.programs, strict=True)
        )
        if used > HELD_BYTES
    ]
    if not held:
        return Finding("GPU memory", "ok", "free: no other program holds any")
    fix = "end those programs, or choose other GPUs: CUDA_VISIBLE_DEVICES=..."
    return Finding("GPU memory", "warn", "; ".join(held), fix)


def _by(pids: tuple[int, ...]) -> str:
    return f" by process {', '.join(map(str, pids))}" if pids else ""


def look_at_torch() -> Torch:
    """Imports torch: the environment must be set by now."""
    import torch

    from flatout.engine.machine.runtime import fast_bf16

    there = torch.cuda.is_available()
    device = torch.device("cuda" if there else "cpu")
    has_nccl = there and torch.distributed.is_nccl_available()
    return Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=torch.cuda.device_count() if there else 0,
        capability=torch.cuda.get_device_capability() if there else None,
        fast_bf16=fast_bf16(device),
        flash=there and torch.backends.cuda.is_flash_attention_available(),
        nccl=_nccl_version() if has_nccl else None,
        compilers=tuple(name for name in COMPILERS if shutil.which(name)),
        triton=find_spec("triton") is not None,
    )


def _nccl_version() -> str:
    import torch

    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def device(driver: Driver | None, torch: Torch) -> Finding:
    """What training computes on."""
    if torch.gpus and driver:
        name, size = driver.gpus[0]
        return Finding("device", "ok", f"{torch.gpus} x {name}, {gib(size)} each")
    if torch.gpus:
        return Finding("device", "ok", f"{torch.gpus} GPUs, no word from the driver")
    if not driver or not driver.gpus:
        text = f"{environment.cpu_name()}, {environment.usable_cores()} cores, no GPU"
        return Finding("device", "ok", text)
    text = f"{driver.gpus[0][0]} is there, and PyTorch {torch.version} cannot use it"
    if torch.cuda is None:
        fix = "install PyTorch for CUDA (pytorch.org/get-started), this one has none"
    else:
        fix = "look at CUDA_VISIBLE_DEVICES, and at what nvidia-smi says"
    return Finding("device", "fail", text, fix)


def driver_version(driver: Driver | None, torch: Torch) -> Finding:
    """The driver's CUDA against PyTorch's."""
    if driver is None:
        return Finding("driver", "ok", "no NVIDIA driver here")
    newest = f"{driver.cuda[0]}.{driver.cuda[1]}"
    text = f"{driver.version}, runs CUDA up to {newest}"
    if torch.cuda is None:
        return Finding("driver", "ok", f"{text}; PyTorch is built without CUDA")
    text += f"; PyTorch is built for {torch.cuda}"
    # Within a major version, an older driver runs what a newer CUDA built.
    if driver.cuda[0] < int(torch.cuda.split(".")[0]):
        fix = f"update the driver, or install PyTorch for CUDA {newest}"
        return Finding("driver", "fail", text, fix)
    return Finding("driver", "ok", text)


def precision(torch: Torch, settings: RuntimeSettings) -> Finding:
    """bf16: is it there, and is it fast."""
    wanted, gpu = settings.precision, torch.gpus > 0
    chosen = ("bf16" if torch.fast_bf16 else "fp32") if wanted == "auto" else wanted
    text = f"{chosen} (runtime.precision: {wanted})"
    fix = "set runtime.precision: auto"
    if chosen == "fp16" and not gpu:
        return Finding("bf16", "fail", f"{text} needs a GPU", fix)
    if chosen == "bf16" and not torch.fast_bf16:
        return Finding("bf16", "warn", f"{text} is slow on this device", fix)
    if chosen == "fp32" and torch.fast_bf16:
        return Finding("bf16", "warn", f"{text}, and bf16 is fast here", fix)
    return Finding("bf16", "ok", text)


def tf32(torch: Torch, settings: RuntimeSettings) -> Finding:
    """Matrix products of fp32 on tensor cores."""
    if torch.capability is None:
        return Finding("TF32", "ok", NO_GPU)
    if torch.capability[0] < 8:
        return Finding("TF32", "ok", "this GPU has none (Ampere and later have)")
    if settings.tf32:
        return Finding("TF32", "ok", "on")
    fix = "set runtime.tf32: true, unless fp32 has to be exact"
    return Finding("TF32", "warn", "the GPU has it, runtime.tf32 is false", fix)


def attention(torch: Torch, settings: RuntimeSettings, max_length: int = 0) -> Finding:
    """The kernels that need no padding, for rows of up to `max_length` tokens."""
    if not torch.gpus:
        return Finding("flash attention", "ok", f"{NO_GPU}, rows go one by one")
    if not torch.flash:
        text = "this PyTorch was built without it: rows are padded"
        fix = "install PyTorch from pytorch.org"
        return Finding("flash attention", "warn", text, fix)
    if settings.attention in ("eager", "sdpa") or not settings.flash_sdp:
        text = f"there, and runtime.attention: {settings.attention} does without it"
        fix = "set runtime.attention: auto and runtime.flash_sdp: true"
        return Finding("flash attention", "warn", text, fix)
    if settings.attention == "flash4" and not _has_flash4():
        text = "runtime.attention: flash4 needs the package flash-attn-4"
        return Finding("flash attention", "fail", text, FLASH4_PAGE)
    return Finding("flash attention", "ok", "there" + _faster(torch, max_length))


def _faster(torch: Torch, max_length: int) -> str:
    suits = torch.capability is not None and torch.capability[0] in FLASH4_GPUS
    if not suits or max_length <= FLASH4_ROWS or _has_flash4():
        return ""
    return (
        f"; without dropout in attention, rows of over {FLASH4_ROWS} tokens are faster "
        f"by runtime.attention: flash4. {FLASH4_PAGE}"
    )


def _has_flash4() -> bool:
    """FlashAttention 2 has the same name to import."""
    try:
        return bool(version("flash-attn-4"))
    except PackageNotFoundError:
        return False


def compiler(torch: Torch, settings: Settings) -> Finding:
    """What torch.compile needs: on a GPU Triton and a C compiler, else a C++ one."""
    wanted = settings.train.compile
    gpu = torch.gpus > 0
    used = gpu if wanted == "auto" else bool(wanted)
    there = [*(["triton"] if torch.triton and gpu else []), *torch.compilers]
    text = ", ".join(there) or "none"
    if not used:
        return Finding("compiler", "ok", f"{text}; train.compile: {wanted} needs none")
    if gpu and not torch.triton:
        return Finding("compiler", "fail", "Triton is missing", "pip install triton")
    suits = any(gpu or name.endswith("++") for name in torch.compilers)
    if suits:
        return Finding("compiler", "ok", text)
    fix = "install one (apt install g++), or set train.compile: false"
    return Finding("compiler", "fail", f"{text}: torch.compile needs one", fix)


def nccl(torch: Torch, processes: int) -> Finding:
    """How ranks talk: NCCL between GPUs, gloo without."""
    if processes == 1:
        return Finding("NCCL", "ok", "one process: not needed")
    if not torch.gpus:
        return Finding("NCCL", "ok", f"{processes} processes on a CPU talk by gloo")
    if torch.nccl is None:
        fix = "install PyTorch for CUDA on Linux, or train.distributed.num_processes: 1"
        return Finding("NCCL", "fail", f"missing, {processes} processes need it", fix)
    return Finding("NCCL", "ok", f"{torch.nccl} for {processes} processes")
