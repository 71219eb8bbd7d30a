"""What the machine did to a run: time its cores went to others, and the GPU's clock."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.engine.runtime import Runtime

CLOCK_EVERY_S = 10.0
"""Asking the driver costs about a millisecond."""
SCHEDULER = Path("/proc/thread-self/schedstat")


class Conditions:
    """Sampled at log points, where the host has waited for the device anyway."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clocks_mhz: list[float] = []
        self._next_clock_s = 0.0
        self.start()

    def start(self) -> None:
        """Shares count from here on."""
        self._begin_s, self._begin_wait_s = time.perf_counter(), waited_for_core_s()
        self._wait_pct: float | None = None

    def sample(self) -> None:
        now_s, wait_s = time.perf_counter(), waited_for_core_s()
        if wait_s is not None and self._begin_wait_s is not None:
            wall_s = max(now_s - self._begin_s, 1e-9)
            self._wait_pct = 100 * (wait_s - self._begin_wait_s) / wall_s
        if self._runtime.is_cuda and now_s >= self._next_clock_s:
            self._next_clock_s = now_s + CLOCK_EVERY_S
            self._sample_clock()

    def _sample_clock(self) -> None:
        try:
            self._clocks_mhz.append(float(torch.cuda.clock_rate(self._runtime.device)))
        except Exception:  # a driver that does not say: no reason to stop a training
            self._next_clock_s = float("inf")

    def figures(self) -> dict[str, Any]:
        clocks = self._clocks_mhz
        return {
            "cpu_wait_pct": self._wait_pct,
            "gpu_clock_mhz": median(clocks) if clocks else None,
        }


def waited_for_core_s() -> float | None:
    """Seconds that this thread was ready to run while all its cores were taken; None
    where the kernel does not count them."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
