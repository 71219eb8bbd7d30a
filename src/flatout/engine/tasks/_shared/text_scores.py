"""Scores of texts by a language model: how unexpected their tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tasks._shared.cross_entropy import Pieces
from flatout.engine.tasks._task import IGNORED, RowAnswers

if TYPE_CHECKING:
    from torch import Tensor


class ScoresTexts(Pieces, RowAnswers):
    """A row's answer is the mean loss of its targets, and the perplexity, exp of it."""

    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (K, 2), summed loss and targets, of logits (K, ..., V) and labels."""
        import torch
        from torch.nn.functional import cross_entropy

        every, flat = logits.reshape(-1, logits.shape[-1]).float(), labels.flatten()
        losses = cross_entropy(every, flat, ignore_index=IGNORED, reduction="none")
        pair = torch.stack([losses, (flat != IGNORED).float()], 1)
        return pair.view(len(labels), -1, 2).sum(1)

    def row_outputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (B, 2), the sums of each row; padding of a batch adds 0."""
        rows, count = _row_of_targets(batch)
        return outputs.new_zeros(count, 2).index_add_(0, rows, outputs)

    def answer_fields(self) -> list[Any]:
        """Fields of the answer, null for a text without a target (a single token)."""
        numbers = [pa.field(name, pa.float32()) for name in ("loss", "perplexity")]
        return [*numbers, pa.field("targets", pa.int64())]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        """Return the columns from (N, 2) of `row_outputs`."""
        total, targets = logits.astype(np.float64).T
        loss = np.ma.masked_array(total / np.maximum(targets, 1), targets == 0)
        columns = {"loss": loss, "perplexity": np.exp(loss)}
        return {n: c.astype(np.float32) for n, c in columns.items()} | {
            "targets": targets.astype(np.int64)
        }


def _row_of_targets(batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return row numbers (K,) of the targets, and the number of rows."""
    import torch

    index = batch["target_index"]
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"][1:]
        found = torch.bucketize(index, ends, right=True)
        return found.clamp(max=len(ends) - 1), len(ends)
    count, length = batch["input_ids"].shape
    return index // length, count
