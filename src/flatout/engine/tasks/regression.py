"""Regression, which predicts one number per row and minimises the squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tasks._task import Device, Metrics, Task, Tensor


class Regression(Task):
    """Squared error of logits (K, 1) and labels (K,). NaN labels have no target."""

    label_type = pa.float64()
    label_dtype = np.dtype(np.float32)
    figures: ClassVar[Mapping[str, bool]] = {
        "loss": False,
        "mse": False,
        "mae": False,
        "pearson": True,
        "spearman": True,
    }

    def token_label_type(self) -> Any:
        return pa.float64()

    def config_keys(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over all targets as an fp32 scalar."""
        error = (logits.squeeze(-1).float() - labels).where(~labels.isnan(), 0.0)
        return error.square().sum()

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.metrics import Numbers

        return Numbers()

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the columns of `Task.judge`. Only exact predictions are right."""
        found = logits.squeeze(-1)
        return {
            "loss": (found - labels).square(),
            "label": labels,
            "prediction": found,
            "wrong": found != labels,
        }

    def answer_fields(self) -> list[Any]:
        return [pa.field("value", pa.float32())]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        return {"value": logits[:, 0]}
