"""The pipelines, one folder each. `kedro run --pipelines=<folder>` runs one of them."""

from __future__ import annotations

from kedro.pipeline import Pipeline

SPLITS = ("train", "validation", "test")


def splits_of(rows: str) -> dict[str, str]:
    """Map the node inputs `train_rows`, `validation_rows` and `test_rows` to catalog
    entries. `rows` is the kind of rows (a value of `train.rows`)."""
    return {f"{split}_rows": f"{split}_{rows}" for split in SPLITS}


def inputs_of(rows: str, tokenizer: str = "tokenizer") -> dict[str, str]:
    """Map the inputs of nodes that train or predict to catalog entries: the splits, the
    label names and, if `rows` is "tokens", the tokenizer. `tokenizer` is the name of
    the tokenizer's catalog entry."""
    known = {**splits_of(rows), "label_names": "label_names"}
    return known | ({"tokenizer": tokenizer} if rows == "tokens" else {})


def parameters(*groups: str) -> dict[str, str]:
    """Map the name of each parameter group to its catalog entry `params:<group>`."""
    return {group: f"params:{group}" for group in groups}


def boxed(name: str, pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` in the namespace `name`, which Kedro-Viz shows as one box.
    Catalog entries keep their names. Nodes that already have a namespace keep it."""
    if any(node.namespace for node in pipeline.nodes):
        return pipeline
    return Pipeline(pipeline, namespace=name, prefix_datasets_with_namespace=False)
