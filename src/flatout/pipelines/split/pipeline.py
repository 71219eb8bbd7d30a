"""Wiring of the split pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.split.nodes import split_rows


def create_pipeline(raw: str = "raw_texts", **_: Any) -> Pipeline:
    """Return the pipeline. `raw`: name of the catalog entry with the raw data."""
    return Pipeline(
        [
            Node(
                func=split_rows,
                inputs=[raw, "params:split", "params:model.task"],
                # The quarantine is saved first: it exists if the run stops.
                outputs={
                    "rejected_rows": "rejected_rows",
                    "train_rows": "train_rows",
                    "validation_rows": "validation_rows",
                    "test_rows": "test_rows",
                    "split_report": "split_report",
                },
                name="split_rows",
            ),
        ]
    )
