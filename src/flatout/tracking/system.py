"""Load of the machine during a run, measured by MLflow's monitors."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from flatout.engine.machine.environment import gpu_names

logger = logging.getLogger(__name__)

SLOWED_LIMIT_PCT = 10.0
"""Share of the samples in which heat or power reduced the clock."""
OTHERS_LIMIT_GIB = 1.0
PREFIX = "system/"
"""MLflow shows metrics with this prefix on a separate page."""


@dataclass
class Gpu:
    """Samples of one GPU."""

    handle: Any
    samples: int = 0
    slowed: int = 0
    others_gib: float = 0.0
    """Maximum memory of programs outside this run, in GiB."""


class GpuWatch:
    """Watch of all GPUs that a run may use. `nvml`: the driver's library; `root_pid`:
    process that started all training processes."""

    def __init__(self, nvml: Any, root_pid: int) -> None:
        self._nvml, self._root_pid = nvml, root_pid
        nvml.nvmlInit()
        self._gpus = {name: Gpu(self._handle(name)) for name in gpu_names()}
        self._reported: set[str] = set()
        self._held_down = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )  # not the power cap, which a busy GPU always reaches

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def sample(self) -> None:
        root = psutil.Process(self._root_pid)
        ours = {root.pid, *(child.pid for child in root.children(recursive=True))}
        for gpu in self._gpus.values():
            with suppress(self._nvml.NVMLError):  # a driver may not report it
                reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(
                    gpu.handle
                )
                gpu.samples += 1
                gpu.slowed += bool(reasons & self._held_down)
                gpu.others_gib = max(gpu.others_gib, self._others_gib(gpu, ours))

    def _others_gib(self, gpu: Gpu, ours: set[int]) -> float:
        """Return GiB used by others; 0 in a container, which sees other process ids."""
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        if not any(process.pid in ours for process in found):
            return 0.0
        others = [process for process in found if process.pid not in ours]
        return sum(process.usedGpuMemory or 0 for process in others) / 2**30

    def new_warnings(self) -> list[str]:
        """Return the findings that are new since the last call."""
        found = {}
        for name, gpu in self._gpus.items():
            slowed_pct = 100 * gpu.slowed / max(gpu.samples, 1)
            if slowed_pct >= SLOWED_LIMIT_PCT:
                found[f"slowed {name}"] = (
                    f"heat or power lowered GPU {name}'s clock {slowed_pct:.0f} % of "
                    "the time: look at its cooling"
                )
            if gpu.others_gib >= OTHERS_LIMIT_GIB:
                found[f"others {name}"] = (
                    f"other programs used up to {gpu.others_gib:.0f} GiB of GPU "
                    f"{name}: end them, or choose another by CUDA_VISIBLE_DEVICES"
                )
        new = [text for key, text in found.items() if key not in self._reported]
        self._reported |= found.keys()
        return new


def watch_gpus(root_pid: int) -> GpuWatch | None:
    """Return the watch; None without a GPU, or without a driver that answers."""
    if not gpu_names():
        return None
    import pynvml

    try:
        return GpuWatch(pynvml, root_pid)
    except pynvml.NVMLError:
        return None


class SystemMetrics:
    """Cores, memory, disk and network of this machine, and its NVIDIA GPUs, if any."""

    def __init__(self, root_pid: int) -> None:
        """`root_pid`: process that started all training processes."""
        self._monitors = _monitors()
        self.gpus = watch_gpus(root_pid)
        self.sample()  # the load of cores is relative to the last sample

    def sample(self) -> dict[str, float]:
        """Return the load since the last call; costs a few milliseconds."""
        with suppress(psutil.Error):  # the run's process is gone
            if self.gpus:
                self.gpus.sample()
        found: dict[str, Any] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            found |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return {f"{PREFIX}{name}": float(value) for name, value in found.items()}


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            monitors.append(kind())
        except Exception as error:  # no GPU, or a system without this figure
            logger.debug("no %s: %s", kind.__name__, error)
    return monitors
