"""Load of the machine during a run, measured by MLflow's monitors."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import psutil

from flatout.tracking.gpu_watch import watch_gpus

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
