"""Forward, backward and optimizer apart: events in the device's own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from flatout.engine.assemble import Trainer
from flatout.engine.collation import StepBatch
from flatout.engine.step import Stepper

PHASES = ("forward", "backward", "optimizer")


class PhaseClock:
    """Sums of phases in milliseconds. Read it after a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._marks.append((name, begin, self._mark()))

    def total_ms(self, name: str) -> float:
        return sum(self._ms(a, b) for phase, a, b in self._marks if phase == name)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        if self._cuda:
            return float(begin.elapsed_time(end))
        return 1000 * float(end - begin)


def phase_ms(
    trainer: Trainer, batches: Iterator[StepBatch], steps: int
) -> dict[str, float]:
    """Mean `forward_ms`, `backward_ms`, `optimizer_ms` over `steps` eager steps."""
    clock = PhaseClock(trainer.runtime.device)
    for _ in range(steps):
        phased_step(trainer.stepper, next(batches), clock)
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


def phased_step(stepper: Stepper, batch: StepBatch, clock: PhaseClock) -> None:
    """The step of :meth:`Stepper.run_eagerly`, with marks between its phases."""
    stepper.tell(batch)
    stepper.clear_gradients()
    runtime, weight = stepper.runtime, stepper.loss_weight
    scale = None if stepper.scaler is None else stepper.scaler.scale
    total = torch.zeros((), device=runtime.device)
    last = len(batch.micro_batches) - 1
    for index, micro in enumerate(batch.micro_batches):
        with nullcontext() if index == last else stepper.no_sync():
            with clock.phase("forward"), runtime.autocast():
                loss, _ = stepper.module(micro.tensors())
            with clock.phase("backward"):
                weighted = loss * weight if scale is None else loss * weight * scale
                weighted.backward()
        total += loss.detach() / batch.num_targets
    if stepper.exchange is not None:
        with clock.phase("backward"):  # where DDP exchanges
            stepper.exchange()
    with clock.phase("optimizer"):
        _, finite = stepper.updater(total, scale)
        if stepper.scaler is not None:
            stepper.scaler.update(finite)
