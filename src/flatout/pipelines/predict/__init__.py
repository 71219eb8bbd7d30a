"""Predict texts or samples with a saved model."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import parameters
from flatout.pipelines.predict.nodes import predict_rows, predict_samples


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    common = {"saved": "model", **parameters("model", "runtime", "split", "predict")}
    if rows == "tokens":
        own = {"tokenizer": "model_tokenizer", "texts": "predict_texts"}
        inputs = {**common, **own, **parameters("tokenize")}
        node = Node(predict_rows, inputs, "predictions", name="predict_rows")
    else:
        own = {"samples": f"predict_{rows}", "kind": "params:train.rows"}
        inputs = {**common, **own, **parameters("arrays", "images")}
        node = Node(predict_samples, inputs, "predictions", name="predict_samples")
    return Pipeline([node])
