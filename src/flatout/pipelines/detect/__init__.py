"""Detect abnormal sessions in logs with a saved model."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import parameters
from flatout.pipelines.detect.nodes import detect_sessions

GROUPS = ("runtime", "model", "split", "tokenize", "predict", "detect")


def create_pipeline(**_: Any) -> Pipeline:
    inputs = {
        "saved": "model",
        "tokenizer": "model_tokenizer",
        "sessions": "detect_sessions",
        **parameters(*GROUPS),
    }
    outputs = {"detections": "detections", "report": "detection_report"}
    return Pipeline([Node(detect_sessions, inputs, outputs, name="detect_sessions")])
