"""Single-label classification of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.tasks._labels import Calibrated, named_labels
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy
from flatout.engine.tasks._task import Device, Metrics


class SequenceClassification(Calibrated, CrossEntropy):
    """Cross entropy over the classes of the train split. With two classes, the second
    class is predicted if its probability is above `model.label_threshold`."""

    label_type = pa.string()
    takes_options = CrossEntropy.takes_options | {"class_weights"}
    figures = {"loss": False} | dict.fromkeys(
        (
            "accuracy",
            "auc",
            "f1_macro",
            "f1_micro",
            "matthews",
            "precision_macro",
            "recall_macro",
            "top_5_accuracy",
        ),
        True,
    )

    def encode_labels(self, labels: Any) -> Any:
        """Convert class names to class numbers (int64)."""
        numbers = pc.index_in(labels, pa.array(self.label_names, pa.string()))
        return numbers.cast(pa.int64())

    def config_keys(self) -> dict[str, Any]:
        kind = {"problem_type": "single_label_classification"}
        return kind | named_labels(self.label_names)

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.metrics import Classes

        return Classes(len(self.label_names), device, self.chosen)

    @property
    def thresholded(self) -> tuple[str, ...]:
        """The name of the second class if there are exactly two, else no name."""
        return self.label_names[1:] if len(self.label_names) == 2 else ()

    def chosen(self, logits: Any) -> Any:
        """Return the predicted classes (...) for logits (..., C)."""
        if not any(cuts := self.cuts()):
            return logits.argmax(-1)
        return (logits[..., 1] - logits[..., 0] > cuts[0]) * 1

    def answer_fields(self) -> list[Any]:
        shares = [f"probability_{name}" for name in self.label_names]
        return [
            pa.field("label", pa.string()),
            *(pa.field(name, pa.float32()) for name in ("score", *shares)),
        ]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        from scipy.special import softmax

        shares = softmax(logits, axis=-1)
        best = self.chosen(logits)
        named = zip(self.label_names, shares.T, strict=True)
        return {
            "label": pa.array(self.label_names, pa.string()).take(pa.array(best)),
            "score": shares[np.arange(len(best)), best],
            **{f"probability_{name}": share for name, share in named},
        }
