"""Convert a saved model to ONNX and other formats, and measure each format."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of, parameters
from flatout.pipelines.export.nodes import export_model

GROUPS = ("runtime", "model", "tokenize", "train", "predict", "export")


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    known = inputs_of(rows, "model_tokenizer")
    del known["validation_rows"]
    inputs = {"saved": "model", **known, **parameters(*GROUPS)}
    outputs = {"report": "export_report", "table": "export_table"}
    return Pipeline([Node(export_model, inputs, outputs, name="export_model")])
