"""Wiring of the images pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.images.nodes import encode_images


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=encode_images,
                inputs=["raw_images", "params:split", "params:images", "params:model"],
                # The quarantine is saved first: it is there when the run stops.
                outputs={
                    "rejected": "rejected_images",
                    "train": "train_images",
                    "validation": "validation_images",
                    "test": "test_images",
                    "label_names": "label_names",
                    "report": "image_report",
                },
                name="encode_images",
            ),
        ]
    )
