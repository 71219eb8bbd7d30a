"""One folder a pipeline; `kedro run --pipelines=<folder>`."""

from __future__ import annotations

from kedro.pipeline import Pipeline


def boxed(name: str, pipeline: Pipeline) -> Pipeline:
    """`pipeline` in the namespace `name`, which Kedro-Viz draws as one box. Entries of
    the catalog keep their names; nodes that have a namespace keep theirs."""
    if any(node.namespace for node in pipeline.nodes):
        return pipeline
    return Pipeline(pipeline, namespace=name, prefix_datasets_with_namespace=False)
