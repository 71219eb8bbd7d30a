"""Multi-label classification, in which a row has any number of labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.tasks._labels import Calibrated, named_labels
from flatout.engine.tasks._shared.cross_entropy import binary_losses
from flatout.engine.tasks._task import Device, Metrics, Task, Tensor


class MultiLabelClassification(Calibrated, Task):
    """Binary cross entropy of logits (K, L) and labels (K, L), summed over the L
    labels. Labels are 0, 1, or NaN if there is no target. A label is predicted if its
    probability is above `model.label_threshold`."""

    label_type = pa.list_(pa.string())
    label_dtype = np.dtype(np.float32)
    figures: ClassVar[Mapping[str, bool]] = {
        "loss": False,
        "accuracy": True,
        "f1_micro": True,
        "f1_macro": True,
    }

    @property
    def label_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.label_names),)

    def token_label_type(self) -> Any:
        """Return a list type with one value, 0 or 1, per label."""
        return pa.list_(pa.float32(), len(self.label_names))

    def encode_labels(self, labels: Any) -> Any:
        """Convert lists of label names to float32 lists with 0 or 1 for each label."""
        numbers = pc.index_in(
            pc.list_flatten(labels), pa.array(self.label_names, pa.string())
        )
        found = np.zeros((len(labels), len(self.label_names)), np.float32)
        found[pc.list_parent_indices(labels).to_numpy(), numbers.to_numpy()] = 1
        lists = pa.FixedSizeListArray.from_arrays(found.ravel(), len(self.label_names))
        return pa.chunked_array([lists])

    def config_keys(self) -> dict[str, Any]:
        return {
            "problem_type": "multi_label_classification",
            **named_labels(self.label_names),
        }

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over targets and labels as an fp32 scalar."""
        return binary_losses(logits, labels).sum()

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        right = (self._given(logits) == (labels == 1)).all(-1)
        real = self.real(labels)
        return (right & real).sum(), real.sum()

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.several_labels import LabelCounts

        return LabelCounts(len(self.label_names), self._given, device)

    def _given(self, logits: Tensor) -> Tensor:
        logits, cuts = logits.float(), self.cuts()
        # In training, all labels share a threshold, which avoids a copy to the device.
        return logits > (cuts[0] if len({*cuts}) == 1 else logits.new_tensor(cuts))

    def chance_loss(self, num_outputs: int) -> float | None:
        """Return the loss if all probabilities are 0.5: ln(2) per label."""
        return num_outputs * math.log(2)

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        true, given = labels == 1, self._given(logits)
        shares = logits.float().sigmoid()
        return {
            "loss": binary_losses(logits, labels).sum(-1),
            "label": [", ".join(self._chosen(row)) for row in true.tolist()],
            "prediction": [", ".join(self._chosen(row)) for row in given.tolist()],
            "score": shares.where(given, 1 - shares).prod(-1),
            "wrong": (true != given).any(-1),
        }

    def _chosen(self, chosen: list[bool]) -> list[str]:
        return [n for n, is_one in zip(self.label_names, chosen, strict=True) if is_one]

    def answer_fields(self) -> list[Any]:
        shares = [f"probability_{name}" for name in self.label_names]
        return [
            pa.field("label", self.label_type),
            *(pa.field(name, pa.float32()) for name in shares),
        ]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        shares = 1 / (1 + np.exp(-logits))
        given = logits > np.array(self.cuts(), np.float32)
        named = zip(self.label_names, shares.T, strict=True)
        return {
            "label": [self._chosen(row) for row in given.tolist()],
            **{f"probability_{name}": share for name, share in named},
        }
