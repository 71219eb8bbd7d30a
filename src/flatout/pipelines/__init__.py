"""One folder per pipeline; `kedro run --pipelines=<folder>`."""

from __future__ import annotations

from kedro.pipeline import Pipeline


def inputs_of(rows: str) -> dict[str, str]:
    """Inputs of nodes that train: the splits of `rows` (the kind of a sample, the value
    of `train.rows`), tokenizer and labels, and the parameters."""
    tokenizer = {"tokenizer": "tokenizer"} if rows == "tokens" else {}
    return {
        **{split: f"{split}_{rows}" for split in ("train", "validation", "test")},
        **tokenizer,
        "label_names": "label_names",
        "runtime": "params:runtime",
        "model": "params:model",
        "tokenize": "params:tokenize",
        "training": "params:train",
    }


def boxed(name: str, pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` in the namespace `name`, which Kedro-Viz draws as one box.
    Catalog entries keep their names; nodes that have a namespace keep theirs."""
    if any(node.namespace for node in pipeline.nodes):
        return pipeline
    return Pipeline(pipeline, namespace=name, prefix_datasets_with_namespace=False)
