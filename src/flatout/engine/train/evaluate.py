"""Compute the loss and metrics of a split. Long rows come first, to reduce padding."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.batches.collation import PLACE, Collator, StepBatch, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.machine.runtime import Runtime
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.models.model import TaskModel
from flatout.engine.parameters import SettingsError
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Task, without_options
from flatout.engine.train.cached_gradients import Part, whole
from flatout.engine.train.own_figures import OwnFigures, OwnMetrics, number_of
from flatout.engine.train.recording.report import Evaluation

logger = logging.getLogger(__name__)

PERPLEXITY = "perplexity"
ROWS_AT_ONCE = 1024
"""The number of rows in an evaluation batch, over all ranks."""
COMPARED_ROWS = 512
"""The number of rows in an evaluation batch if the loss compares rows with each other.
It does not depend on the global batch size, so that runs can be compared."""
EVALUATION_EPOCH = 0
"""The epoch number from which random targets, such as masked tokens, are drawn. It is
always the same, so that losses can be compared."""


class Sums:
    """Accumulates the loss, the number of targets and the metrics of a split on the
    device. `own` contains custom metrics, if there are any."""

    def __init__(
        self, task: Task, device: torch.device, own: OwnMetrics | None = None
    ) -> None:
        self._task = without_options(task)
        self._metrics = OwnFigures(own, task, device) if own else task.metrics(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._targets = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Update the loss and the metrics with logits (k, ...) and labels (k, ...)."""
        self.add_loss(logits, labels)
        self.judge(logits, labels)

    def add_loss(self, logits: Tensor, labels: Tensor) -> None:
        """Update only the loss with logits (k, ...) and labels (k, ...)."""
        self._loss += self._task.loss(logits, labels).double()
        self._targets += self._task.real(labels).sum()

    def judge(self, logits: Tensor, labels: Tensor) -> None:
        """Update only the metrics with logits (k, ...) and labels (k, ...)."""
        if self._metrics is not None:
            self._metrics.update(logits, labels)

    def read(self, runtime: Runtime) -> Evaluation:
        """Return the loss and the metrics over all ranks. This synchronises the device.
        Raises SettingsError if a metric is not a number."""
        if runtime.ranks.world_size > 1:
            self._merge(runtime.ranks.world_size)
        targets = int(self._targets)
        if not targets:
            logger.warning(
                "the evaluated split has no targets (rows of one token, or of only "
                "special tokens): it has no loss"
            )
        loss = float(self._loss) / targets if targets else math.nan
        found = self._figures(runtime)
        if PERPLEXITY in self._task.figures:
            found[PERPLEXITY] = float(np.exp(loss))
        numbers = {name: number_of(value) for name, value in found.items()}
        for name, number in numbers.items():
            if number is None:
                raise SettingsError(
                    f"model.task: the metrics of {self._task.settings.task} have "
                    f"{name}: {found[name]!r}: give a number, or remove it"
                )
        known = {n: x for n, x in numbers.items() if x is not None and math.isfinite(x)}
        return Evaluation(loss, known)

    def _figures(self, runtime: Runtime) -> dict[str, Any]:
        """Return the metrics, computed on the main rank for all ranks, because values
        might differ slightly between ranks, or a custom metric might fail on some."""
        box: list[Any] = [{}]
        if runtime.ranks.is_main and self._metrics is not None:
            try:
                box = [self._metrics.compute()]
            except SettingsError as error:
                box = [error]
        if runtime.ranks.world_size > 1:
            torch.distributed.broadcast_object_list(box, 0, device=runtime.device)
        if isinstance(box[0], SettingsError):
            raise box[0]
        found: dict[str, Any] = box[0]
        return found

    def _merge(self, world_size: int) -> None:
        own = [] if self._metrics is None else self._metrics.tensors()
        for tensor in (self._loss, self._targets, *own):
            torch.distributed.all_reduce(tensor)
        for parts in [] if self._metrics is None else self._metrics.kept():
            parts[:] = gathered(torch.cat(parts), world_size)


def gathered(own: Tensor, world_size: int) -> list[Tensor]:
    """Return each rank's tensor `own` (k, ...). k may differ between ranks."""
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, own.cpu())
    return [part.to(own.device) for part in found]


@torch.no_grad()
def evaluate(
    model: TaskModel,
    rows: SplitRows,
    planner: Planner,
    collator: Collator,
    runtime: Runtime,
    own: OwnMetrics | None = None,
    most_rows: int | None = None,
) -> Evaluation:
    """Evaluate all `rows`, or at most `most_rows` of them. Return the loss and the
    metrics, which include the custom metrics `own`. The device is synchronised once, at
    the end. The model's training mode is restored."""
    compares = model.task.whole_batch
    order, size = np.arange(len(rows)), COMPARED_ROWS
    if not compares:
        order, size = np.argsort(-rows.lengths(order), kind="stable"), ROWS_AT_ONCE
    order = order[:most_rows]
    sums = Sums(model.task, runtime.device, own)
    with evaluating(model):
        unused = GlobalBatches(len(rows), size, seed=0)
        step_rows = StepRows(rows, unused, planner, collator, runtime.ranks.rank)
        for start in range(0, len(order), size):
            heartbeat.beat()
            row_ids = order[start : start + size]
            batch = step_rows.cut(row_ids, 0, EVALUATION_EPOCH).to(runtime.device)
            if compares:
                _compare(model, batch, sums, runtime)
                continue
            for micro in batch.micro_batches:
                with runtime.autocast():
                    model.logits_in_parts(micro, sums.add)
    return sums.read(runtime)


def _compare(model: TaskModel, batch: StepBatch, sums: Sums, runtime: Runtime) -> None:
    """Add a batch whose loss compares all of its rows. Only the main rank adds the
    loss, because `Sums.read` sums over ranks."""
    parts: list[Part] = []
    for micro in batch.micro_batches:

        def take(logits: Tensor, labels: Tensor, places: Tensor) -> None:
            sums.judge(logits, labels)
            parts.append((logits, labels, places))

        with runtime.autocast():
            model.logits_in_parts(micro, partial(take, places=micro[PLACE]))
    logits, labels = whole(parts, batch.num_sequences, runtime.ranks.world_size)
    if runtime.ranks.is_main:
        sums.add_loss(logits, labels)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
