"""Where the time of a step goes: forward, backward, optimizer; the GPU's own view."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from flatout.engine.batches.collation import StepBatch
from flatout.engine.machine.runtime import Runtime
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.step import Stepper

PHASES = ("forward", "backward", "optimizer")


@dataclass
class PhaseClock:
    """When the phases of steps began, on `device`. Read it after a synchronisation."""

    device: torch.device
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    @contextmanager
    def on(self, stepper: Stepper) -> Iterator[None]:
        """Times the step that `stepper` takes, not another one. The backward pass is
        what lies behind a forward pass; ranks exchange gradients in it."""
        seen: Any = stepper
        module, updater = stepper.module, stepper.updater
        seen.module = _Timed(module, self.mark, "forward", "backward")
        seen.updater = _Timed(updater, self.mark, "optimizer", "rest")
        try:
            yield
        finally:
            stepper.module, stepper.updater = module, updater

    def total_ms(self, name: str) -> float:
        return sum(
            self._ms(begin, end)
            for (phase, begin), (_, end) in pairwise(self._marks)
            if phase == name
        )

    def mark(self, name: str) -> None:
        """The phase `name` begins now, and the one before ends."""
        point: Any = time.perf_counter()
        if self.device.type == "cuda":
            point = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            point.record()
        self._marks.append((name, point))

    def _ms(self, begin: Any, end: Any) -> float:
        if self.device.type == "cuda":
            return float(begin.elapsed_time(end))
        return 1000 * float(end - begin)


@dataclass
class _Timed:
    """`inner`, whose call is the phase `name`; behind it begins the phase `then`."""

    inner: Any
    mark: Callable[[str], None]
    name: str
    then: str

    def __call__(self, *arguments: Any) -> Any:
        self.mark(self.name)
        result = self.inner(*arguments)
        self.mark(self.then)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def phase_ms(
    trainer: Trainer, batches: Iterator[StepBatch], steps: int
) -> dict[str, float]:
    """Mean `forward_ms`, `backward_ms`, `optimizer_ms` over `steps` eager steps."""
    clock = PhaseClock(trainer.runtime.device)
    with clock.on(trainer.stepper):
        for _ in range(steps):
            trainer.stepper.run_eagerly(next(batches))
    trainer.runtime.synchronize()
    return {f"{name}_ms": clock.total_ms(name) / steps for name in PHASES}


def launch_ms(
    trainer: Trainer, batches: Iterator[StepBatch], steps: int
) -> float | None:
    """Time until a step's last kernel is launched, into an empty queue; the median of
    `steps`. None where launching is computing, on a CPU."""
    if not trainer.runtime.is_cuda:
        return None
    taken = []
    for _ in range(steps):
        batch = next(batches)
        trainer.runtime.synchronize()
        begin = time.perf_counter()
        trainer.stepper(batch)
        taken.append(1000 * (time.perf_counter() - begin))
    return median(taken)


def gpu_util_pct(runtime: Runtime) -> float | None:
    """The driver's, of the last second or less; None on a CPU, or if nobody says."""
    if not runtime.is_cuda:
        return None
    try:
        return float(torch.cuda.utilization(runtime.device))
    except Exception:  # no nvidia-ml-py, or a driver that does not say
        return None
