"""One folder a pipeline; `kedro run --pipelines=<folder>`."""

from __future__ import annotations

from kedro.pipeline import Pipeline


def inputs_of(rows: str) -> dict[str, str]:
    """Of nodes that train: the splits of `rows` (what a sample is, as `train.rows`
    says), tokenizer and labels, and the parameters of all of them."""
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
    """`pipeline` in the namespace `name`, which Kedro-Viz draws as one box. Entries of
    the catalog keep their names; nodes that have a namespace keep theirs."""
    if any(node.namespace for node in pipeline.nodes):
        return pipeline
    return Pipeline(pipeline, namespace=name, prefix_datasets_with_namespace=False)
