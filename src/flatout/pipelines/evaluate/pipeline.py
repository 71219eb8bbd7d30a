"""Wiring of the evaluate pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.evaluate.nodes import judge_predictions, predict_split

SPLIT = {
    "tokenizer": "model_tokenizer",
    "train": "train_tokens",
    "validation": "validation_tokens",
    "test": "test_tokens",
    "label_names": "label_names",
    "evaluate": "params:evaluate",
}


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=predict_split,
                inputs={
                    **SPLIT,
                    "model": "model",
                    "runtime": "params:runtime",
                    "tokenize": "params:tokenize",
                    "options": "params:model",
                },
                outputs={"predictions": "test_predictions", "figures": "test_figures"},
                name="predict_split",
            ),
            Node(
                func=judge_predictions,
                inputs={
                    **SPLIT,
                    "predictions": "test_predictions",
                    "figures": "test_figures",
                },
                outputs={
                    "report": "evaluation_report",
                    "classes": "class_metrics",
                    "confusion": "confusion_matrix",
                    "wrong": "wrong_predictions",
                },
                name="judge_predictions",
            ),
        ]
    )
