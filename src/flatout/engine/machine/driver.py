"""Query the NVIDIA driver for information about GPUs, without CUDA or PyTorch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU. `programs` contains the IDs of the processes that use the GPU."""

    name: str
    total_bytes: int
    used_bytes: int = 0
    programs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, the newest CUDA version that it supports, and its GPUs."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def query_driver() -> Driver | None:
    """Return information about the driver and GPUs, or None if there is no driver."""
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
        gpus=tuple(map(_gpu, handles)),
    )


def _gpu(handle: Any) -> Gpu:
    import pynvml

    total_bytes, used_bytes, programs = 0, 0, []
    with suppress(pynvml.NVMLError):  # a GPU without dedicated memory
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total_bytes, used_bytes = int(memory.total), int(memory.used)
    with suppress(pynvml.NVMLError):  # processes may be invisible in a container
        programs = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        programs=tuple(sorted(int(process.pid) for process in programs)),
    )
