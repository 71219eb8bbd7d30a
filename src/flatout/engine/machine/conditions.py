"""Measure the state of the machine during a run: the speed of its cores, the time spent
waiting for a core, and the clock rate of the GPU."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.engine.machine.runtime import Runtime

CLOCK_EVERY_S = 10.0
"""The interval between clock readings. Querying the driver costs about 1 ms."""
PROBE_EVERY_S = 2.0
"""The interval between probes. A probe takes 1.3 to 2.3 ms on 2 cores, about 0.1 %."""
PROBE_SIDE, PROBE_NUMBERS = 384, 1 << 20
SCHEDULER = Path("/proc/thread-self/schedstat")


class Conditions:
    """Takes samples at log points, when the host has already waited for the device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clocks_mhz: list[float] = []
        self._next_clock_s = 0.0
        self._probe = None if runtime.is_cuda else Probe()
        self._next_probe_s = 0.0
        self.start()

    def start(self) -> None:
        """Begin the period in which the waiting time is measured."""
        self._begin_s, self._begin_wait_s = time.perf_counter(), waited_for_core_s()
        self._wait_pct: float | None = None

    def sample(self) -> None:
        now_s, wait_s = time.perf_counter(), waited_for_core_s()
        if wait_s is not None and self._begin_wait_s is not None:
            wall_s = max(now_s - self._begin_s, 1e-9)
            self._wait_pct = 100 * (wait_s - self._begin_wait_s) / wall_s
        if self._probe is not None and now_s >= self._next_probe_s:
            self._next_probe_s = now_s + PROBE_EVERY_S
            self._probe.run()
        if self._runtime.is_cuda and now_s >= self._next_clock_s:
            self._next_clock_s = now_s + CLOCK_EVERY_S
            with suppress(Exception):  # the driver does not report the clock rate
                clock_mhz = torch.cuda.clock_rate(self._runtime.device)
                self._clocks_mhz.append(float(clock_mhz))

    def figures(self) -> dict[str, Any]:
        clocks = self._clocks_mhz
        return {
            "cpu_wait_pct": self._wait_pct,
            "cpu_probe_ms": self._probe.typical_ms if self._probe else None,
            "gpu_clock_mhz": median(clocks) if clocks else None,
        }


class Probe:
    """A fixed workload similar to a training step: a matrix product, and an addition to
    4 MiB of numbers, which do not fit in the cores' caches. If it takes longer, the
    cores were slower, or shared with another virtual machine."""

    def __init__(self) -> None:
        self._square = torch.ones(PROBE_SIDE, PROBE_SIDE)
        self._numbers = torch.ones(PROBE_NUMBERS)
        self._times_ms: list[float] = []
        self._work()  # warm up, so that the first measured call has no set-up cost

    def run(self) -> None:
        begin_s = time.perf_counter()
        self._work()
        self._times_ms.append(1000 * (time.perf_counter() - begin_s))

    @property
    def typical_ms(self) -> float | None:
        return median(self._times_ms) if self._times_ms else None

    def _work(self) -> None:
        with torch.no_grad():
            torch.mm(self._square, self._square)
            torch.add(self._numbers, 1.0)


def waited_for_core_s() -> float | None:
    """Return how many seconds this thread has waited for a free core in total, or None
    if the kernel does not count them."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
