"""Run an optimizer step (forward, backward, update) without synchronising the device.
Losses, correct predictions and norms stay on the device (`StepSums`) until a logging
step. If a step has one micro-batch of a known shape, it can be replayed as a CUDA
graph, or as two graphs around the all-reduce between ranks. This is faster for small
batches, whose kernels take longer to launch than to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.batches.buffers import Shapes
from flatout.engine.batches.collation import ROW, StepBatch
from flatout.engine.machine.runtime import Runtime
from flatout.engine.ops.dropout import Noise
from flatout.engine.train.cached_gradients import CachedGradients, Loss
from flatout.engine.train.flat_all_reduce import FlatAllReduce
from flatout.engine.train.optimizer import Updater
from flatout.engine.train.recording.audit import RowAudit
from flatout.engine.train.recording.timing import compile_clock

logger = logging.getLogger(__name__)

Hits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""A function that maps logits and labels to the number of correct predictions and the
total number of predictions, as scalar tensors, or to None if it cannot count them."""
MAX_GRAPHS = 64
"""The maximum number of CUDA graphs, which is enough for nearly all shapes. More graphs
would leave too little memory for steps without graphs."""
MOST_SHAPES = 1_024
"""The maximum number of shapes to remember. A shape is captured when it recurs."""


@dataclass
class StepSums:
    """Sums on the device over the steps since the last logging step."""

    loss: Tensor
    """This rank's contribution to the mean loss, summed over steps (a scalar)."""
    hits: Tensor
    """The number of correct predictions on this rank, in steps that count them."""
    judged: Tensor
    """The total number of predictions in these steps."""
    last_loss: Tensor
    last_norm: Tensor
    first_bad_step: Tensor
    """The first step whose loss or gradient was not finite, or NEVER."""

    NEVER = 2**62

    @classmethod
    def zeros(cls, device: torch.device) -> StepSums:
        zero = partial(torch.zeros, (), dtype=torch.float32, device=device)
        count = partial(zero, dtype=torch.int64)
        never = count().fill_(cls.NEVER)
        return cls(zero(), count(), count(), zero(), zero(), never)

    @property
    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums that a logging step resets and a checkpoint keeps."""
        return self.loss, self.hits, self.judged


@dataclass(eq=False)
class Stepper:
    """Runs the steps of one model on one device. `module` maps a dict of tensors to
    (summed loss, logits or None). `no_sync` turns off gradient reduction, for every
    micro-batch except the last. `all_reduce` reduces the gradients once, after the last
    micro-batch. `hits` counts correct predictions every `metrics_every` steps, or at
    every step with CUDA graphs, because this then costs nothing. `compare` is a loss
    over all samples of a global batch. `audit` collects statistics of each row."""

    module: nn.Module
    updater: Updater
    runtime: Runtime
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    all_reduce: FlatAllReduce | None = None
    cuda_graphs: bool = False
    metrics_every: int = 1
    hits: Hits | None = None
    noise: Noise | None = None
    compare: Loss | None = None
    audit: RowAudit | None = None

    def __post_init__(self) -> None:
        device, fp16 = self.runtime.device, self.runtime.precision == "fp16"
        self._audited: list[tuple[Tensor, Tensor, Tensor]] = []
        self.sums = StepSums.zeros(device)
        self.step_number = torch.zeros((), dtype=torch.int64, device=device)
        self._loss_divisor = torch.ones((), device=device)
        self._loss = torch.zeros((), device=device)
        self._never = torch.full_like(self.step_number, StepSums.NEVER)
        self.scaler = _LossScale(self.runtime) if fp16 else None
        self._graphs = _StepGraphs(self) if self.cuda_graphs else None
        self._first = True

    def __call__(self, batch: StepBatch) -> None:
        if self._graphs is not None and self._graphs.run(batch):
            return
        self.set_scalars(batch)
        self.launch(batch)
        if self._first:
            self._first = False
            compile_clock.first_step_done()

    def drop_graphs(self) -> None:
        """Free the memory of all CUDA graphs, and run later steps without graphs."""
        self._graphs = None

    def set_scalars(self, batch: StepBatch) -> None:
        """Set the values that differ between steps with the same shape. CUDA graphs
        read them from the device. If a batch has no targets, its loss and gradients are
        zero. AdamW still decays its moments and the weights, as in PyTorch."""
        self.step_number.fill_(batch.step)
        self._loss_divisor.fill_(batch.divisor or 1.0)

    def launch(self, batch: StepBatch) -> None:
        """Launch all kernels of a step."""
        self._backward(batch)
        if self.all_reduce is not None:
            self.all_reduce()
        self.update()
        self._add_audited()  # last, because steps that run out of memory are repeated

    def backward(self, batch: StepBatch) -> None:
        """Compute this rank's gradients and its contribution to the mean loss."""
        self._backward(batch)
        self._add_audited()

    def _backward(self, batch: StepBatch) -> None:
        self.clear_gradients()
        self._loss.copy_(self._accumulate_gradients(batch))

    def update(self) -> None:
        """Clip the reduced gradients, update the weights and note the figures."""
        scale = None if self.scaler is None else self.scaler.scale
        norm, finite = self.updater(self._loss, scale)
        bad = ~finite
        if self.scaler is not None:  # above the floor, skipped steps are normal
            bad &= self.scaler.scale <= self.scaler.FLOOR
            self.scaler.update(finite)
        self.sums.loss += self._loss
        self.sums.last_loss.copy_(self._loss)
        self.sums.last_norm.copy_(norm)
        step = torch.where(bad, self.step_number, self._never)
        torch.minimum(self.sums.first_bad_step, step, out=self.sums.first_bad_step)

    def clear_gradients(self) -> None:
        if self.all_reduce is not None:
            self.all_reduce.clear()
        else:
            self.updater.optimizer.zero_grad(set_to_none=True)

    def _accumulate_gradients(self, batch: StepBatch) -> Tensor:
        """Accumulate the gradients of the global batch's mean loss over micro-batches.
        Return this rank's contribution to the loss as a scalar tensor."""
        is_whole = self.runtime.ranks.world_size == 1 and len(batch.layout) == 1
        if self.compare is not None and not is_whole:
            return self._compare_samples(batch, self.compare)
        total = torch.zeros((), device=self.runtime.device)
        self._audited.clear()
        micro_batches = batch.micro_batches
        for index, micro in enumerate(micro_batches, 1):
            self._draw()
            is_last = index == len(micro_batches)
            loss, logits = self._forward_backward(micro, is_last=is_last)
            total += loss.detach() / self._loss_divisor
            counts = self._graphs is not None or batch.step % self.metrics_every == 0
            if logits is not None and counts:
                self._count_hits(logits, micro["labels"])
            if logits is not None and self.audit is not None:
                self._audited.append((micro[ROW], logits.detach(), micro["labels"]))
        return total

    def _add_audited(self) -> None:
        if self.audit is not None:
            for found in self._audited:
                self.audit.add(*found)
        self._audited.clear()

    def _compare_samples(self, batch: StepBatch, loss: Loss) -> Tensor:
        """Accumulate the gradients of a loss that compares all samples of the global
        batch with each other. Return this rank's contribution to the loss."""
        own = self.module, batch, loss, self.runtime, self.no_sync, self._draw
        cached = CachedGradients(*own)
        for index, tensors in enumerate(cached, 1):
            self._forward_backward(tensors, is_last=index == len(batch.layout))
        return cached.loss / self._loss_divisor

    def _draw(self) -> None:
        if self.noise is not None:
            self.noise.draw()

    def _forward_backward(
        self, tensors: dict[str, Tensor], *, is_last: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the forward and backward pass of a micro-batch. Return its summed loss,
        and its logits or None. `is_last` is true for the last micro-batch of a step."""
        # DDP averages the gradients of the ranks, whereas `all_reduce` sums them.
        ranks = 1 if self.all_reduce is not None else self.runtime.ranks.world_size
        with nullcontext() if is_last else self.no_sync():
            with self.runtime.autocast():
                loss, logits = self.module(tensors)
            scaled = loss * (ranks / self._loss_divisor)
            if self.scaler is not None:
                scaled = scaled * self.scaler.scale
            scaled.backward()
        return loss, logits

    def _count_hits(self, logits: Tensor, labels: Tensor) -> None:
        """Count correct predictions, for logits (K, ...) and labels (K, ...)."""
        counted = None if self.hits is None else self.hits(logits, labels)
        if counted is not None:
            self.sums.hits += counted[0]
            self.sums.judged += counted[1]


class _LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018), kept on the device."""

    GROWTH_INTERVAL = 2000
    FLOOR = 1.0
    """The smallest scale. An overflow at this scale must have another cause."""

    def __init__(self, runtime: Runtime) -> None:
        self.scale = torch.full((), 2.0**16, device=runtime.device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=runtime.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        return {"loss_scale/scale": self.scale, "loss_scale/steps": self._good_steps}

    def update(self, finite: Tensor) -> None:
        growth, backoff, overflow = 2.0, 0.5, (~finite).float()
        torch._amp_update_scale_(
            *(self.scale, self._good_steps, overflow),
            *(growth, backoff, self.GROWTH_INTERVAL),
        )


class _StepGraphs:
    """CUDA graphs of steps, one per input shape. With several ranks, they end after the
    backward pass, and a further graph for all shapes contains the update."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._graphs: dict[Shapes, tuple[Any, Tensor]] = {}
        """The graph of each shape, and the buffer from which it reads a batch."""
        self._update: Any = None
        self._seen: set[Shapes] = set()
        self._pool: Any = None

    def run(self, batch: StepBatch) -> bool:
        """Replay the graph for `batch`, or return False if the step must run without a
        graph. A shape runs without a graph once before it is captured, because capture
        would fail if it included compilation."""
        key = batch.layout
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS or not self._seen_before(key):
                return False
            self._graphs[key] = self._capture(batch)
        graph, buffer = self._graphs[key]
        self._stepper.set_scalars(batch)
        buffer.copy_(batch.buffer, non_blocking=True)
        graph.replay()
        if self._stepper.all_reduce is not None:
            self._stepper.all_reduce()
            self._update.replay()
        return True

    def _seen_before(self, key: Shapes) -> bool:
        seen = key in self._seen
        if len(self._seen) >= MOST_SHAPES:  # most of them never recur
            self._seen.clear()
        self._seen.add(key)
        return seen

    def _capture(self, batch: StepBatch) -> tuple[Any, Tensor]:
        """Capture the graph of a step without running it, so weights do not change."""
        begin = time.perf_counter()
        buffer = batch.buffer.clone()
        own = replace(batch, buffer=buffer)
        self._stepper.clear_gradients()
        if self._stepper.all_reduce is None:
            graph = self._record(partial(self._stepper.launch, own))
        else:
            graph = self._record(partial(self._stepper.backward, own))
            self._update = self._update or self._record(self._stepper.update)
        compile_clock.add(time.perf_counter() - begin)
        logger.debug("captured a CUDA graph for %s", batch.layout)
        return graph, buffer

    def _record(self, work: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads that pin or copy memory may make calls that a capture forbids.
        with torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        ):
            work()
        self._pool = self._pool or graph.pool()
        return graph
