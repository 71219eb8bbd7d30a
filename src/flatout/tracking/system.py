"""Load of the machine during a run, measured by MLflow's monitors."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from flatout.engine.machine.environment import gpu_names

SLOWED_LIMIT_PCT = 10.0
"""Share of the samples in which heat or power reduced the clock."""
OTHERS_LIMIT_GIB = 1.0


@dataclass
class Gpu:
    """Samples of one GPU."""

    name: str
    """Name or index in CUDA_VISIBLE_DEVICES."""
    handle: Any
    before: frozenset[int] = frozenset()
    """Processes that used memory before this run's did: others, whatever their ids."""
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
        self._gpus = [Gpu(name, self._handle(name)) for name in gpu_names()]
        for gpu in self._gpus:
            with suppress(nvml.NVMLError):
                gpu.before = frozenset(p.pid for p in self._processes(gpu))
        self._told: set[str] = set()
        self._held_down = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )  # not the power cap, which a busy GPU always reaches

    def sample(self) -> None:
        root = psutil.Process(self._root_pid)
        ours = {root.pid, *(child.pid for child in root.children(recursive=True))}
        for gpu in self._gpus:
            with suppress(self._nvml.NVMLError):  # a driver may not report it
                reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(
                    gpu.handle
                )
                gpu.samples += 1
                gpu.slowed += bool(reasons & self._held_down)
                gpu.others_gib = max(gpu.others_gib, self._others_gib(gpu, ours))

    def news(self) -> list[str]:
        """Return the findings that are new since the last call."""
        found = {
            key: text
            for gpu in self._gpus
            for key, text in _findings(gpu).items()
            if key not in self._told
        }
        self._told |= found.keys()
        return list(found.values())

    def _others_gib(self, gpu: Gpu, ours: set[int]) -> float:
        """Return GiB used by others. In a container process ids differ, so that own and
        other processes look alike: it counts those that were there before."""
        found = self._processes(gpu)
        named = any(process.pid in ours for process in found)
        held = [
            process.usedGpuMemory or 0
            for process in found
            if (process.pid not in ours if named else process.pid in gpu.before)
        ]
        return float(sum(held)) / 2**30

    def _processes(self, gpu: Gpu) -> list[Any]:
        return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle))

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


def _findings(gpu: Gpu) -> dict[str, str]:
    found = {}
    slowed_pct = 100 * gpu.slowed / max(gpu.samples, 1)
    if slowed_pct >= SLOWED_LIMIT_PCT:
        found[f"slowed {gpu.name}"] = (
            f"heat or power held GPU {gpu.name}'s clock down {slowed_pct:.0f} % of the "
            "time: look at its cooling"
        )
    if gpu.others_gib >= OTHERS_LIMIT_GIB:
        found[f"others {gpu.name}"] = (
            f"other programs held up to {gpu.others_gib:.0f} GiB of GPU {gpu.name}: "
            "end them, or choose another by CUDA_VISIBLE_DEVICES"
        )
    return found


def watch_gpus(root_pid: int) -> GpuWatch | None:
    """Return the watch; None without a GPU, or without a driver that answers."""
    if not gpu_names():
        return None
    import pynvml

    try:
        return GpuWatch(pynvml, root_pid)
    except pynvml.NVMLError:
        return None


logger = logging.getLogger(__name__)

PREFIX = "system/"
"""MLflow shows metrics with this prefix on a separate page."""


class SystemMetrics:
    """Cores, memory, disk and network of this machine, and its NVIDIA GPUs, if any."""

    def __init__(self, root_pid: int) -> None:
        """`root_pid`: process that started all training processes."""
        self._monitors = _monitors()
        self._gpus = watch_gpus(root_pid)
        self.sample()  # the load of cores is relative to the last sample

    def gpu_news(self) -> list[str]:
        """Return new faults of GPUs."""
        return self._gpus.news() if self._gpus else []

    def sample(self) -> dict[str, float]:
        """Return the load since the last call; costs a few milliseconds."""
        with suppress(psutil.Error):  # the run's process is gone
            if self._gpus:
                self._gpus.sample()
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
