"""Checks of the device and of the compilers that torch.compile needs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from flatout.engine.machine import checks, environment
from flatout.engine.machine.checks import Finding, gib
from flatout.engine.machine.driver import Driver
from flatout.engine.parameters import Settings

COMPILERS = ("g++", "gcc", "clang++", "clang")


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch. `cuda` is the CUDA version of the build, or None for a CPU
    build. `gpus` is the number of usable GPUs."""

    version: str
    cuda: str | None
    gpus: int
    fast_bf16: bool
    compilers: tuple[str, ...]
    triton: bool


def query_torch() -> Torch:
    """Import torch once the environment is configured, and return information about the
    installation."""
    import torch

    from flatout.engine.machine.runtime import fast_bf16

    there = torch.cuda.is_available()
    return Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=torch.cuda.device_count() if there else 0,
        fast_bf16=fast_bf16(torch.device("cuda" if there else "cpu")),
        compilers=tuple(name for name in COMPILERS if shutil.which(name)),
        triton=find_spec("triton") is not None,
    )


def device(driver: Driver | None, torch: Torch, settings: Settings) -> Finding:
    """Return a finding about the device, its driver and the configured precision."""
    if driver and torch.cuda and driver.cuda[0] < int(torch.cuda.split(".")[0]):
        # Within a major version, an older driver can run code built for a newer CUDA.
        newest = f"{driver.cuda[0]}.{driver.cuda[1]}"
        text = (
            f"driver {driver.version} runs CUDA up to {newest}; PyTorch is built for "
        )
        fix = f"update the driver, or install PyTorch for CUDA {newest}"
        return Finding("device", "fail", f"{text}{torch.cuda}", fix)
    if driver and driver.gpus and not torch.gpus:
        text = (
            f"{driver.gpus[0].name} exists, but PyTorch {torch.version} cannot use it"
        )
        fix = "check CUDA_VISIBLE_DEVICES and the output of nvidia-smi"
        if torch.cuda is None:
            fix = (
                "install PyTorch with CUDA (pytorch.org/get-started); the installed "
                "build is for CPUs"
            )
        return Finding("device", "fail", text, fix)
    return _precision(_named(driver, torch), torch, settings.runtime.precision)


def _named(driver: Driver | None, torch: Torch) -> str:
    if not torch.gpus:
        cores = checks.counted_cores(environment.usable_cores())
        return f"{environment.cpu_name()}, {cores}, no GPU"
    if not driver:
        return f"{torch.gpus} GPUs, but the driver does not answer"
    gpu = driver.gpus[0]
    return (
        f"{torch.gpus} x {gpu.name}, {gib(gpu.total_bytes)} each, driver "
        f"{driver.version}"
    )


def _precision(text: str, torch: Torch, wanted: str) -> Finding:
    fix = "set runtime.precision: auto"
    if wanted == "fp16" and not torch.gpus:
        return Finding("device", "fail", f"{text}; fp16 needs a GPU", fix)
    if wanted == "bf16" and not torch.fast_bf16:
        return Finding("device", "warn", f"{text}; bf16 is slow on it", fix)
    if wanted == "fp32" and torch.fast_bf16:
        return Finding("device", "warn", f"{text}; bf16 is fast on it", fix)
    return Finding("device", "ok", text)


def compiler(torch: Torch, settings: Settings) -> Finding:
    """Return a finding about the compilers for torch.compile, which needs a C++
    compiler on the CPU, or Triton and a C compiler on a GPU."""
    wanted = settings.train.compile
    gpu = torch.gpus > 0
    used = gpu if wanted == "auto" else bool(wanted)
    there = [*(["triton"] if torch.triton and gpu else []), *torch.compilers]
    text = ", ".join(there) or "none"
    if not used:
        return Finding("compiler", "ok", f"{text}; train.compile: {wanted} needs none")
    if gpu and not torch.triton:
        return Finding("compiler", "fail", "Triton is missing", "pip install triton")
    if any(gpu or name.endswith("++") for name in torch.compilers):
        return Finding("compiler", "ok", text)
    fix = "install one (apt install g++), or set train.compile: false"
    return Finding("compiler", "fail", f"{text}: torch.compile needs one", fix)
