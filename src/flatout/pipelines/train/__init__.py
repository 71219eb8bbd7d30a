"""Train a model, and return it with a report and its training history."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of, parameters
from flatout.pipelines.train.nodes import train_model

GROUPS = ("runtime", "model", "tokenize", "train", "paths")


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    inputs = {**inputs_of(rows), **parameters(*GROUPS)}
    outputs = {
        "model": "model",
        "last_model": "last_model",
        "report": "train_report",
        "summary": "train_summary",
        "history": "train_history",
    }
    return Pipeline([Node(train_model, inputs, outputs, name="train_model")])
