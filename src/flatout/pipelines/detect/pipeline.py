"""Wiring of the detect pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.detect.nodes import detect_sessions


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=detect_sessions,
                inputs={
                    "model": "model",
                    "tokenizer": "model_tokenizer",
                    "sessions": "detect_sessions",
                    "runtime": "params:runtime",
                    "trained": "params:model",
                    "split": "params:split",
                    "tokenize": "params:tokenize",
                    "predict": "params:predict",
                    "detect": "params:detect",
                },
                outputs={"detections": "detections", "report": "detection_report"},
                name="detect_sessions",
            )
        ]
    )
