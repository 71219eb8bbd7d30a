"""Wiring of the train pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.train.nodes import train_model


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=train_model,
                inputs={
                    "train": "train_tokens",
                    "validation": "validation_tokens",
                    "test": "test_tokens",
                    "tokenizer": "tokenizer",
                    "label_names": "label_names",
                    "runtime": "params:runtime",
                    "model": "params:model",
                    "tokenize": "params:tokenize",
                    "training": "params:train",
                    "paths": "params:paths",
                },
                outputs={
                    "model": "model",
                    "last_model": "last_model",
                    "report": "train_report",
                    "history": "train_history",
                    "confusion": "confusion_matrix",
                },
                name="train_model",
            )
        ]
    )
