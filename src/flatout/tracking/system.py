"""System metrics during a run, measured with MLflow's monitors."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil

from flatout.engine.machine.environment import gpu_names

logger = logging.getLogger(__name__)

SLOWED_LIMIT_PCT = 10.0
"""A GPU is reported if heat or power slows its clock in this percentage of samples."""
OTHERS_LIMIT_GIB = 1.0
PREFIX = "system/"
"""Prefix of the metrics that MLflow shows on a page of their own."""


class GpuWatch:
    """Checks all GPUs that a run may use for throttled clocks and for other programs.
    `nvml` is the module `pynvml`, and `root_pid` is the ID of the process that started
    all training processes."""

    def __init__(self, nvml: Any, root_pid: int) -> None:
        self._nvml, self._root_pid = nvml, root_pid
        nvml.nvmlInit()
        self._gpus = {name: self._handle(name) for name in gpu_names()}
        self._samples: Counter[str] = Counter()
        self._slowed: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._held_down = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )  # the power cap is ignored, because a busy GPU always reaches it

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def sample(self) -> list[str]:
        """Check the GPUs once, and return messages about problems that have not been
        reported before."""
        root, found = psutil.Process(self._root_pid), {}
        ours = {root.pid, *(child.pid for child in root.children(recursive=True))}
        for name, gpu in self._gpus.items():
            with suppress(self._nvml.NVMLError):  # some drivers do not report this
                found |= self._findings(name, gpu, ours)
        new = [text for key, text in found.items() if key not in self._reported]
        self._reported |= found.keys()
        return new

    def _findings(self, name: str, gpu: Any, ours: set[int]) -> dict[str, str]:
        found = {}
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        self._samples[name] += 1
        self._slowed[name] += bool(reasons & self._held_down)
        slowed_pct = 100 * self._slowed[name] / self._samples[name]
        if slowed_pct >= SLOWED_LIMIT_PCT:
            found[f"slowed {name}"] = (
                f"heat or power lowered GPU {name}'s clock {slowed_pct:.0f} % of the "
                "time: check its cooling"
            )
        if (others_gib := self._others_gib(gpu, ours)) >= OTHERS_LIMIT_GIB:
            found[f"others {name}"] = (
                f"other programs use {others_gib:.0f} GiB of GPU {name}: end them, or "
                "choose another with CUDA_VISIBLE_DEVICES"
            )
        return found

    def _others_gib(self, gpu: Any, ours: set[int]) -> float:
        """Return the GPU memory (GiB) used by processes not in `ours`. The result is 0
        if the driver lists none of `ours`, as in a container."""
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        if not any(process.pid in ours for process in found):
            return 0.0
        others = [process for process in found if process.pid not in ours]
        return sum(process.usedGpuMemory or 0 for process in others) / 2**30


def watch_gpus(root_pid: int) -> GpuWatch | None:
    """Return a GpuWatch, or None if there is no GPU or the driver does not respond."""
    if not gpu_names():
        return None
    import pynvml

    try:
        return GpuWatch(pynvml, root_pid)
    except pynvml.NVMLError:
        return None


class SystemMetrics:
    """Metrics of the machine's CPU, memory, disk, network and NVIDIA GPUs."""

    def __init__(self, root_pid: int) -> None:
        """`root_pid` is the ID of the process that started all training processes."""
        self._monitors = _monitors()
        self._gpus = watch_gpus(root_pid)
        self.sample()  # CPU utilisation is measured since the last sample

    def sample(self) -> dict[str, float]:
        """Return the metrics since the last call, and log new GPU problems."""
        with suppress(psutil.Error):  # the run's process is gone
            for text in self._gpus.sample() if self._gpus else ():
                logger.warning("%s", text)
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
        except Exception as error:  # no GPU, or not available on this system
            logger.debug("no %s: %s", kind.__name__, error)
    return monitors
