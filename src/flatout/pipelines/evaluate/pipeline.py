"""Wiring of the evaluate pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.evaluate.nodes import (
    judge_predictions,
    predict_split,
    show_reliability,
    show_wrong_images,
)


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    splits = {
        "train": f"train_{rows}",
        "validation": f"validation_{rows}",
        "test": f"test_{rows}",
        "evaluate": "params:evaluate",
    }
    known = {**splits, "label_names": "label_names"}
    if rows == "tokens":
        known["tokenizer"] = "model_tokenizer"
    nodes = [
        Node(
            func=predict_split,
            inputs={
                **known,
                "model": "model",
                "runtime": "params:runtime",
                "tokenize": "params:tokenize",
                "options": "params:model",
                "training": "params:train",
            },
            outputs={"predictions": "test_predictions", "figures": "test_figures"},
            name="predict_split",
        ),
        Node(
            func=judge_predictions,
            inputs={
                **known,
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
        Node(
            func=show_reliability,
            inputs="evaluation_report",
            outputs="reliability_figure",
            name="show_reliability",
        ),
    ]
    if rows == "images":
        sheet = Node(
            func=show_wrong_images,
            inputs={**splits, "wrong": "wrong_predictions"},
            outputs="wrong_images",
            name="show_wrong_images",
        )
        nodes.append(sheet)
    return Pipeline(nodes)
