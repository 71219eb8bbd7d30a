"""Rows of one shape, images and numbers, for the Hugging Face Trainer.

Its collator stacks bytes as flatout's does, and crops and standardising happen on the
device: the Trainer at its best, not a loop that is slowed down by its transforms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.engine.batches.collation import Collator
from flatout.engine.families import family_of
from flatout.engine.rows.layout import Layout
from flatout.engine.tasks import Task
from flatout.engine.train.setup.job import TrainJob


class RowNumbers(torch.utils.data.Dataset[int]):
    """The number of each row, in place of the row."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> int:
        return row


class SampleCollator:
    """Numbers of rows -> their fields, crops drawn each time."""

    def __init__(self, job: TrainJob) -> None:
        self._rows = job.train
        self._collator = Collator(job.task, Layout(max_length=1))

    def __call__(self, rows: list[int]) -> dict[str, Tensor]:
        epoch = int(torch.randint(2**31, ()))  # the worker's own generator
        batch = self._collator.collate(self._rows, np.array(rows), epoch)
        return {**batch.inputs, "labels": batch.labels}


class OnDevice(nn.Module):
    """`model` behind what its family does to samples on the device, with the mean
    loss of the task."""

    accepts_loss_kwargs = False
    """Losses are means already."""

    def __init__(self, model: Any, task: Task) -> None:
        super().__init__()
        self.model, self._task = model, task
        self._family = family_of(model.config)

    def forward(self, labels: Tensor, **fields: Tensor) -> dict[str, Tensor]:
        """Fields (B, ...) and labels (B, ...) -> loss () and logits (B, ...)."""
        config = self.model.config
        if self.training:
            fields = dict(self._family.augment(config, fields))
        logits = self.model(**self._family.inputs(config, fields, 1)).logits
        return {"loss": self._task.loss(logits, labels) / len(labels), "logits": logits}
