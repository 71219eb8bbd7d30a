"""A task of one's own: two numbers for each row, by squared error."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.tasks import Task


class TwoNumbers(Task):
    """Logits (K, 2) against labels (K, 2); NaN where there is no target."""

    label_type = pa.list_(pa.float64())
    label_dtype = np.dtype(np.float32)
    label_shape = (2,)

    def label_fault(self, labels):
        """Lists of another length."""
        sizes = pc.unique(pc.list_value_length(labels)).to_pylist()
        return None if sizes == [2] else f"lists of {sizes} numbers; give two to each"

    def token_label_type(self):
        """As many in each row, so that they are read without a copy."""
        return pa.list_(pa.float64(), 2)

    def config_keys(self):
        """Of the model: two outputs."""
        return {"num_labels": 2, "problem_type": "regression"}

    def loss(self, logits, labels):
        """Summed over the targets, fp32 ()."""
        error = (logits.float() - labels).where(~labels.isnan(), 0.0)
        return error.square().sum()

    def judge(self, logits, labels):
        """Every pair is more or less wrong."""
        return {
            "loss": (logits - labels).square().sum(-1),
            "label": [_text(pair) for pair in labels],
            "prediction": [_text(pair) for pair in logits],
            "wrong": [True] * len(labels),
        }

    def answer_fields(self):
        """Columns of a prediction."""
        return [pa.field("first", pa.float32()), pa.field("second", pa.float32())]

    def answers(self, logits):
        """Of logits (N, 2)."""
        return {"first": logits[:, 0], "second": logits[:, 1]}


def _text(numbers):
    return " ".join(f"{number:.3g}" for number in numbers.tolist())
