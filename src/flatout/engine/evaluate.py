"""Loss and accuracy of a split: long rows first, nothing padded that need not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.engine.batching import GlobalBatches, Ints, Planner
from flatout.engine.collation import IGNORED, Collator, StepRows
from flatout.engine.jobs.heartbeat import heartbeat
from flatout.engine.model import TaskModel, summed_loss
from flatout.engine.report import Evaluation
from flatout.engine.runtime import Runtime
from flatout.engine.tokens import TokenRows

ROWS_AT_ONCE = 1024
"""Rows planned together; each rank takes its share of them."""
EVALUATION_EPOCH = 0
"""Masks of masked-lm are those of epoch 0 each time, so that losses compare."""


@dataclass
class _Sums:
    loss: Tensor  # () float64
    targets: Tensor  # () int64
    hits: Tensor  # () int64
    confusion: Tensor  # (C * C,) int64; empty where there are no classes


@torch.no_grad()
def evaluate(
    model: TaskModel,
    rows: TokenRows,
    planner: Planner,
    collator: Collator,
    runtime: Runtime,
    num_classes: int = 0,
) -> Evaluation:
    """Over all rows once; one synchronisation, at the end. Model is left as it was."""
    sums = _zeros(runtime.device, num_classes)
    with _evaluating(model):
        for step_rows, row_ids in _batches(rows, planner, collator, runtime):
            heartbeat.beat()
            batch = step_rows.cut(row_ids, 0, EVALUATION_EPOCH).to(runtime.device)
            for micro in batch.micro_batches:
                with runtime.autocast():
                    logits = model.logits(micro.tensors())
                _add(sums, logits, micro.labels, model, num_classes)
    return _read(sums, runtime, num_classes, model.task == "regression")


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _batches(
    rows: TokenRows, planner: Planner, collator: Collator, runtime: Runtime
) -> Iterator[tuple[StepRows, Ints]]:
    order = np.argsort(-rows.all_lengths, kind="stable")
    unused = GlobalBatches(len(rows), ROWS_AT_ONCE, seed=0)
    step_rows = StepRows(rows, unused, planner, collator, runtime.ranks.rank)
    for start in range(0, len(order), ROWS_AT_ONCE):
        yield step_rows, order[start : start + ROWS_AT_ONCE]


def _zeros(device: torch.device, num_classes: int) -> _Sums:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    loss = zeros(dtype=torch.float64)
    return _Sums(loss, zeros(), zeros(), zeros(num_classes * num_classes))


def _add(
    sums: _Sums, logits: Tensor, labels: Tensor, model: TaskModel, num_classes: int
) -> None:
    """Add a micro-batch: logits (K, classes or vocabulary), labels (K,)."""
    sums.loss += summed_loss(logits, labels, model.task).double()
    real = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    sums.targets += real.sum()
    if labels.is_floating_point():
        return
    predicted = logits.argmax(-1)
    sums.hits += (predicted == labels).sum()
    if num_classes:
        # Rows without a target count 0 for cell 0: no shape depends on the data.
        cells = torch.where(real, labels * num_classes + predicted, 0)
        sums.confusion.index_add_(0, cells, real.long())


def _read(
    sums: _Sums, runtime: Runtime, num_classes: int, regression: bool
) -> Evaluation:
    if runtime.ranks.world_size > 1:
        for tensor in (sums.loss, sums.targets, sums.hits, sums.confusion):
            torch.distributed.all_reduce(tensor)
    targets = max(1, int(sums.targets))
    return Evaluation(
        loss=float(sums.loss) / targets,
        accuracy=None if regression else int(sums.hits) / targets,
        confusion=sums.confusion.view(num_classes, num_classes).tolist(),
    )
