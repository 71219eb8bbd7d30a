"""Check the raw rows and divide them into three splits."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.split.nodes import split_rows

# Rejected rows are saved first, so that they exist even if the run fails later.
OUTPUTS = ("rejected_rows", "train_rows", "validation_rows", "test_rows")


def create_pipeline(raw: str = "raw_texts", **_: Any) -> Pipeline:
    """Return the pipeline. `raw` is the name of the catalog entry with the raw data."""
    inputs = [raw, "params:split", "params:model.task"]
    outputs = {name: name for name in (*OUTPUTS, "split_report")}
    return Pipeline([Node(split_rows, inputs, outputs, name="split_rows")])
