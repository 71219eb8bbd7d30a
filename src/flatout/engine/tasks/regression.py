"""One number for each row, by squared error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.rows.layout import Ints
from flatout.engine.tasks._task import Judged, Metrics, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Regression(Task):
    """Squared error of logits (K, 1) and labels (K,); NaN without a target."""

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

    @classmethod
    def fits(cls, config: Any, kind: type) -> bool:
        return kind.__name__.endswith(cls.architectures) and config.num_labels == 1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the targets, fp32 ()."""
        error = (logits.squeeze(-1).float() - labels).where(~labels.isnan(), 0.0)
        return error.square().sum()

    def metrics(self, device: torch.device) -> Metrics:
        from flatout.engine.tasks._shared.metrics import Numbers

        return Numbers()

    def judge(
        self, logits: Tensor, labels: Tensor, decode: Callable[[Ints], str]
    ) -> list[Judged]:
        """Return label and prediction; a number is never exactly right or wrong."""
        found = zip(logits.squeeze(-1).tolist(), labels.tolist(), strict=True)
        return [Judged((p - y) ** 2, y, p, None, p != y) for p, y in found]

    def answer_fields(self) -> list[Any]:
        return [pa.field("value", pa.float32())]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        return {"value": logits[:, 0]}
