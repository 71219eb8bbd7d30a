"""A custom task: predict two numbers for each row, with the squared error as loss."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.tasks import Task


class TwoNumbers(Task):
    """Compare logits (K, 2) with labels (K, 2). A missing target is NaN."""

    label_type = pa.list_(pa.float64())
    label_dtype = np.dtype(np.float32)
    label_shape = (2,)

    def label_fault(self, labels):
        sizes = pc.unique(pc.list_value_length(labels)).to_pylist()
        return None if sizes == [2] else f"lists of {sizes} numbers, not of 2"

    def token_label_type(self):
        return pa.list_(pa.float64(), 2)

    def config_keys(self):
        return {"num_labels": 2, "problem_type": "regression"}

    def loss(self, logits, labels):
        """Return the loss summed over the targets, an fp32 scalar."""
        error = (logits.float() - labels).where(~labels.isnan(), 0.0)
        return error.square().sum()

    def judge(self, logits, labels):
        """Report each pair as wrong, because two floats are practically never equal."""
        return {
            "loss": (logits - labels).square().sum(-1),
            "label": [_text(pair) for pair in labels],
            "prediction": [_text(pair) for pair in logits],
            "wrong": [True] * len(labels),
        }

    def answer_fields(self):
        return [pa.field("first", pa.float32()), pa.field("second", pa.float32())]

    def answers(self, logits):
        return {"first": logits[:, 0], "second": logits[:, 1]}


def _text(numbers):
    return " ".join(f"{number:.3g}" for number in numbers.tolist())
