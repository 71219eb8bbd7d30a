"""Wiring of the predict pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.predict.nodes import predict_rows, predict_samples

COMMON = {
    "model": "model",
    "model_settings": "params:model",
    "runtime": "params:runtime",
    "split": "params:split",
    "predict": "params:predict",
}


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    if rows == "tokens":
        node = Node(
            func=predict_rows,
            inputs={
                **COMMON,
                "tokenizer": "model_tokenizer",
                "texts": "predict_texts",
                "tokenize": "params:tokenize",
            },
            outputs="predictions",
            name="predict_rows",
        )
    else:
        node = Node(
            func=predict_samples,
            inputs={
                **COMMON,
                "samples": f"predict_{rows}",
                "kind": "params:train.rows",
                "arrays": "params:arrays",
                "images": "params:images",
            },
            outputs="predictions",
            name="predict_samples",
        )
    return Pipeline([node])
