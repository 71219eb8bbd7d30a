"""Wiring of the export pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.export.nodes import export_model

GROUPS = ("runtime", "model", "tokenize", "train", "predict", "export")


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    splits = {f"{name}_rows": f"{name}_{rows}" for name in ("train", "test")}
    inputs = {"saved": "model", "label_names": "label_names", **splits}
    inputs |= {"tokenizer": "model_tokenizer"} if rows == "tokens" else {}
    inputs |= {group: f"params:{group}" for group in GROUPS}
    outputs = {"report": "export_report", "table": "export_table"}
    return Pipeline([Node(export_model, inputs, outputs, name="export_model")])
