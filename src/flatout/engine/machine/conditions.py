"""What the machine did to a run: how fast its cores were, whether they went to others,
and the GPU's clock."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.engine.machine.runtime import Runtime

CLOCK_EVERY_S = 10.0
"""Asking the driver costs about a millisecond."""
PROBE_EVERY_S = 2.0
"""A probe takes 1.3 to 2.3 ms (2 cores): about a tenth of a percent."""
PROBE_SIDE, PROBE_NUMBERS = 384, 1 << 20
SCHEDULER = Path("/proc/thread-self/schedstat")


class Conditions:
    """Sampled at log points, where the host has waited for the device anyway."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clocks_mhz: list[float] = []
        self._next_clock_s = 0.0
        self._probe = None if runtime.is_cuda else Probe()
        self._next_probe_s = 0.0
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
        if self._probe is not None and now_s >= self._next_probe_s:
            self._next_probe_s = now_s + PROBE_EVERY_S
            self._probe.run()
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
            "cpu_probe_ms": self._probe.typical_ms if self._probe else None,
            "gpu_clock_mhz": median(clocks) if clocks else None,
        }


class Probe:
    """A fixed piece of work, as a step has it: a product, and 4 MiB that the cores' own
    caches do not hold. Where it takes longer, the cores were slower or shared with a
    neighbour that this machine cannot see (a virtual one counts no stolen time)."""

    def __init__(self) -> None:
        self._square = torch.ones(PROBE_SIDE, PROBE_SIDE)
        self._numbers = torch.ones(PROBE_NUMBERS)
        self._times_ms: list[float] = []
        self._work()  # what the first call sets up is no part of it

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
    """Seconds that this thread was ready to run while all its cores were taken; None
    where the kernel does not count them."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
