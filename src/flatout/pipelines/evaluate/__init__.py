"""Evaluate a saved model on a split, and list the predictions with the largest loss."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of, parameters, splits_of
from flatout.pipelines.evaluate.nodes import (
    judge_predictions,
    predict_split,
    show_reliability,
    show_wrong_images,
)

GROUPS = ("runtime", "tokenize", "evaluate", "model", "train")
REPORT = "evaluation_report"


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    known, split = inputs_of(rows, "model_tokenizer"), parameters("evaluate")
    predicted = {"predictions": "test_predictions", "figures": "test_figures"}
    judged = {
        "report": REPORT,
        "classes": "class_metrics",
        "confusion": "confusion_matrix",
        "wrong": "wrong_predictions",
    }
    inputs = {"saved": "model", **known, **parameters(*GROUPS)}
    results, figure = {**known, **predicted, **split}, "reliability_figure"
    nodes = [
        Node(predict_split, inputs, predicted, name="predict_split"),
        Node(judge_predictions, results, judged, name="judge_predictions"),
        Node(show_reliability, REPORT, figure, name="show_reliability"),
    ]
    if rows == "images":
        shown = {**splits_of(rows), **split, "wrong": "wrong_predictions"}
        name = "show_wrong_images"
        nodes.append(Node(show_wrong_images, shown, "wrong_images", name=name))
    return Pipeline(nodes)
