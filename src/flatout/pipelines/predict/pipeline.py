"""Wiring of the predict pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.predict.nodes import predict_rows


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=predict_rows,
                inputs={
                    "model": "model",
                    "tokenizer": "model_tokenizer",
                    "texts": "predict_texts",
                    "model_settings": "params:model",
                    "runtime": "params:runtime",
                    "split": "params:split",
                    "tokenize": "params:tokenize",
                    "predict": "params:predict",
                },
                outputs="predictions",
                name="predict_rows",
            )
        ]
    )
