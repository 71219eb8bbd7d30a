"""One folder per pipeline; `kedro run --pipelines=<folder>`."""

from __future__ import annotations

from kedro.pipeline import Pipeline

SPLITS = ("train", "validation", "test")


def splits_of(rows: str) -> dict[str, str]:
    """Inputs `train_rows`, `validation_rows`, `test_rows` of nodes. `rows`: the kind of
    a sample, the value of `train.rows`."""
    return {f"{split}_rows": f"{split}_{rows}" for split in SPLITS}


def inputs_of(rows: str, tokenizer: str = "tokenizer") -> dict[str, str]:
    """Inputs of nodes that train or predict rows: the splits, the labels and, for
    tokens, the entry `tokenizer`."""
    known = {**splits_of(rows), "label_names": "label_names"}
    return known | ({"tokenizer": tokenizer} if rows == "tokens" else {})


def parameters(*groups: str) -> dict[str, str]:
    """Inputs of nodes that make their settings from groups of parameters."""
    return {group: f"params:{group}" for group in groups}


def boxed(name: str, pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` in the namespace `name`, which Kedro-Viz draws as one box.
    Catalog entries keep their names; nodes that have a namespace keep theirs."""
    if any(node.namespace for node in pipeline.nodes):
        return pipeline
    return Pipeline(pipeline, namespace=name, prefix_datasets_with_namespace=False)
