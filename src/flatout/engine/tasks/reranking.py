"""Reranking: score a passage for a query, with a cross-encoder that reads both texts.

The loss is the same as BinaryCrossEntropyLoss of sentence-transformers, whose
`CrossEncoder` class can load the saved model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tasks._shared.cross_entropy import binary_losses
from flatout.engine.tasks._task import Device, Metrics, RankedRows, Task, Tensor, Texts


class Reranking(RankedRows, Task):
    """Binary cross entropy of logits (K, 1) and labels (K, 2). The first column of the
    labels is the score of the row, in [0, 1], and the second column the number of its
    query. Rows without a target have NaN labels."""

    texts = Texts(form="ranking")
    label_type = pa.float64()
    label_dtype = np.dtype(np.float32)
    label_shape = (2,)
    figures: ClassVar[Mapping[str, bool]] = {
        "loss": False,
        "mrr_at_10": True,
        "ndcg_at_10": True,
        "average_precision": True,
    }

    def token_label_type(self) -> Any:
        """Return a list type for the score and the query number. fp32 numbers up to
        2**24 are exact."""
        return pa.list_(pa.float32(), 2)

    def encode_ranked(self, labels: Any, queries: npt.NDArray[Any]) -> Any:
        pairs = np.stack([labels.to_numpy(), queries], 1).astype(np.float32)
        return pa.FixedSizeListArray.from_arrays(pa.array(pairs.ravel()), 2)

    def config_keys(self) -> dict[str, Any]:
        """Return the config for one output, whose sigmoid is the score."""
        return {"num_labels": 1, "problem_type": None}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over all targets as an fp32 scalar."""
        return binary_losses(logits[:, 0], labels[:, 0]).sum()

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.ranking import Ranking

        return Ranking()

    def chance_loss(self, num_outputs: int) -> float | None:
        return math.log(2)

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the columns of `Task.judge`. A prediction is wrong if exactly one of
        score and label is at least 0.5."""
        scores, wanted = logits[:, 0].float().sigmoid(), labels[:, 0]
        return {
            "loss": binary_losses(logits[:, 0], wanted),
            "label": wanted,
            "prediction": scores,
            "wrong": (wanted >= 0.5) != (scores >= 0.5),
        }

    def answer_fields(self) -> list[Any]:
        """Return a field for the score, which is between 0 and 1."""
        return [pa.field("score", pa.float32())]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        return {"score": 1 / (1 + np.exp(-logits[:, 0]))}
