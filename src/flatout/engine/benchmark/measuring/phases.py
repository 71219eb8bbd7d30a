"""Measure the time of each phase of a step, on the host and on the GPU."""

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
from flatout.engine.train.recording.timing import elapsed_s, mark
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.step import Stepper

PHASES = ("forward", "backward", "optimizer")


@dataclass
class PhaseClock:
    """Records the start of each phase. Synchronise `device` before reading times."""

    device: torch.device
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    @contextmanager
    def on(self, stepper: Stepper) -> Iterator[None]:
        """Context manager that times the steps of `stepper`. The backward phase lasts
        until the optimiser starts, so it includes the all-reduce of gradients."""
        seen: Any = stepper
        module, updater = stepper.module, stepper.updater
        seen.module = _Timed(module, self.mark, "forward", "backward")
        seen.updater = _Timed(updater, self.mark, "optimizer", "rest")
        try:
            yield
        finally:
            stepper.module, stepper.updater = module, updater

    def total_ms(self, name: str) -> float:
        return 1000 * sum(
            elapsed_s(begin, end)
            for (phase, begin), (_, end) in pairwise(self._marks)
            if phase == name
        )

    def mark(self, name: str) -> None:
        """Begin the phase `name`, which ends the previous phase."""
        self._marks.append((name, mark(self.device)))


@dataclass
class _Timed:
    """Wraps a callable. The phase `name` begins before each call, `then` after it."""

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
    """Return forward_ms, backward_ms and optimizer_ms, means over eager steps."""
    clock = PhaseClock(trainer.runtime.device)
    with clock.on(trainer.stepper):
        for _ in range(steps):
            batch = next(batches)
            trainer.stepper.set_scalars(batch)
            trainer.stepper.launch(batch)
    trainer.runtime.synchronize()
    return {f"{name}_ms": clock.total_ms(name) / steps for name in PHASES}


def launch_ms(
    trainer: Trainer, batches: Iterator[StepBatch], steps: int
) -> float | None:
    """Return how long the host takes to launch a step, in ms: the median over `steps`
    steps, each of which starts with an empty queue. Returns None on a CPU."""
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
    """Return the GPU utilisation over at most the last second, or None if unknown."""
    if not runtime.is_cuda:
        return None
    try:
        return float(torch.cuda.utilization(runtime.device))
    except Exception:  # nvidia-ml-py is missing, or the driver does not report it
        return None
