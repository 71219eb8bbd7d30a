"""Wiring of the arrays pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.arrays.nodes import encode_arrays


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=encode_arrays,
                inputs=["raw_arrays", "params:split", "params:arrays", "params:model"],
                # The quarantine is saved first: it is there when the run stops.
                outputs={
                    "rejected": "rejected_arrays",
                    "train": "train_arrays",
                    "validation": "validation_arrays",
                    "test": "test_arrays",
                    "label_names": "label_names",
                    "report": "array_report",
                },
                name="encode_arrays",
            ),
        ]
    )
