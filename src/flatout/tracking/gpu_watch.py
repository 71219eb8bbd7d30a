"""What the NVIDIA driver says of each GPU while a run goes on, judged at its end.

Use, clock, throttling and other programs' memory; MLflow's own monitor has memory and
power. Guide E's threshold for use (70 %) is the verdict's too.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from types import ModuleType
from typing import Any

import psutil

from flatout.engine.machine.environment import gpu_names

USED_LIMIT_PCT = 70.0
APART_PCT = 20.0
"""Use of one GPU so far below the busiest has a cause of its own."""
SLOWED_LIMIT_PCT = 10.0
"""Share of the samples in which heat or power held the clock down."""
OTHERS_LIMIT_GIB = 1.0
LEAST_SAMPLES = 3
"""Of steps: fewer tell nothing of a GPU's use."""


@dataclass
class Gpu:
    """Samples of one."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it."""
    handle: Any
    used_pct: list[float] = field(default_factory=list)
    """While steps were taken."""
    slowed: list[bool] = field(default_factory=list)
    before: frozenset[int] = frozenset()
    """Processes that held memory before this run's did: others', whatever their ids."""
    others_gib: float = 0.0
    """The most that programs outside this run held."""


class GpuWatch:
    """All GPUs that this run may use. `nvml`: the driver's library."""

    def __init__(self, nvml: ModuleType | Any, root_pid: int | None = None) -> None:
        self._nvml, self._root_pid = nvml, root_pid
        nvml.nvmlInit()
        self._gpus = [Gpu(name, self._handle(name)) for name in gpu_names()]
        self._told: set[tuple[str, str]] = set()
        for gpu in () if _has_context() else self._gpus:
            with suppress(nvml.NVMLError):
                gpu.before = frozenset(p.pid for p in self._processes(gpu.handle))
        self._held_down = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )  # not the power cap: a GPU that works hard is always at it

    def sample(self, *, training: bool) -> dict[str, float]:
        """Costs a few milliseconds. `training`: steps were taken since the last one."""
        ours = _own_processes(self._root_pid)
        found: dict[str, float] = {}
        for gpu in self._gpus:
            with suppress(self._nvml.NVMLError):  # a driver may not say
                found |= self._sampled(gpu, ours, training)
        return found

    def _sampled(self, gpu: Gpu, ours: set[int], training: bool) -> dict[str, float]:
        nvml, handle = self._nvml, gpu.handle
        if training:
            used = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            gpu.used_pct.append(float(used))
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        gpu.slowed.append(bool(reasons & self._held_down))
        clock_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        others_gib = self._others_gib(gpu, ours)
        gpu.others_gib = max(gpu.others_gib, others_gib)
        return {
            f"gpu_{gpu.name}_clock_mhz": float(clock_mhz),
            f"gpu_{gpu.name}_slowed": float(gpu.slowed[-1]),
            f"gpu_{gpu.name}_others_gib": others_gib,
        }

    def _others_gib(self, gpu: Gpu, ours: set[int]) -> float:
        """A container sees processes under other numbers, and cannot tell its own from
        its neighbours': there it counts those that came before."""
        found = self._processes(gpu.handle)
        named = any(process.pid in ours for process in found)
        held = [
            process.usedGpuMemory or 0
            for process in found
            if (process.pid not in ours if named else process.pid in gpu.before)
        ]
        return float(sum(held)) / 2**30

    def _processes(self, handle: Any) -> list[Any]:
        return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def findings(self) -> list[str]:
        """What is wrong, a text each; empty where all is well."""
        return list(self._findings().values())

    def news(self) -> list[str]:
        """The findings that are seen for the first time."""
        found = self._findings()
        new = [text for illness, text in found.items() if illness not in self._told]
        self._told |= found.keys()
        return new

    def _findings(self) -> dict[tuple[str, str], str]:
        """By illness and GPU."""
        use = {g.name: fmean(g.used_pct) for g in self._gpus if _is_judged(g)}
        found = {}
        for gpu in self._gpus:
            if gpu.name in use and use[gpu.name] < USED_LIMIT_PCT:
                idle = f"GPU {gpu.name} idle {100 - use[gpu.name]:.0f} %"
                cause = _cause(use[gpu.name], max(use.values()))
                found["idle", gpu.name] = f"{idle}: {cause}"
            slowed_pct = 100 * fmean(gpu.slowed) if gpu.slowed else 0.0
            if slowed_pct >= SLOWED_LIMIT_PCT:
                found["slowed", gpu.name] = (
                    f"heat or power held GPU {gpu.name}'s clock down "
                    f"{slowed_pct:.0f} % of the time: look at its cooling"
                )
            if gpu.others_gib >= OTHERS_LIMIT_GIB:
                found["others", gpu.name] = (
                    f"other programs held up to {gpu.others_gib:.0f} GiB of GPU "
                    f"{gpu.name}: end them, or choose another by CUDA_VISIBLE_DEVICES"
                )
        return found

    def summary(self) -> str:
        """One line: each GPU's use, and what is wrong. Empty where neither is known."""
        judged = [g for g in self._gpus if _is_judged(g)]
        use = [f"GPU {g.name} used {fmean(g.used_pct):.0f} %" for g in judged]
        found = self.findings()
        if found and not use:
            use = ["use of GPUs not judged, too few samples"]
        return "; ".join([", ".join(use), *found] if use else [])


def _is_judged(gpu: Gpu) -> bool:
    return len(gpu.used_pct) >= LEAST_SAMPLES


def _cause(used_pct: float, most_pct: float) -> str:
    if most_pct - used_pct >= APART_PCT:
        return "its rank had less to do than the busiest GPU's"
    return "it waits for the loader or the host: kedro run --pipelines=benchmark says"


def _has_context() -> bool:
    """Whether this process uses a GPU already, as a notebook's may."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _own_processes(root_pid: int | None) -> set[int]:
    """`root_pid`, or this one, and all that it has started."""
    root = psutil.Process(root_pid)
    return {root.pid, *(process.pid for process in root.children(recursive=True))}


def watch_gpus(root_pid: int | None = None) -> GpuWatch | None:
    """None where there is no GPU, or no driver that answers."""
    if not gpu_names():
        return None
    import pynvml

    try:
        return GpuWatch(pynvml, root_pid)
    except pynvml.NVMLError:
        return None
