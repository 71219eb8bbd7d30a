"""Wiring of the train pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of
from flatout.pipelines.train.nodes import train_model


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    return Pipeline(
        [
            Node(
                func=train_model,
                inputs={**inputs_of(rows), "paths": "params:paths"},
                outputs={
                    "model": "model",
                    "last_model": "last_model",
                    "report": "train_report",
                    "summary": "train_summary",
                    "history": "train_history",
                },
                name="train_model",
            )
        ]
    )
