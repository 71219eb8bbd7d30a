"""Which pipelines there are, and which of them `kedro run` runs."""

from __future__ import annotations

from kedro.framework.project import find_pipelines
from kedro.pipeline import Pipeline

from flatout.pipelines import boxed

DEFAULT = ("split", "tokenize", "train", "evaluate")


def register_pipelines() -> dict[str, Pipeline]:
    """Every folder of `pipelines/`; under `--pipelines` only those asked for."""
    found = find_pipelines(raise_errors=True)
    pipelines = {name: boxed(name, pipeline) for name, pipeline in found.items()}
    default = [pipelines[name] for name in DEFAULT if name in pipelines]
    return {**pipelines, "__default__": sum(default, start=Pipeline([]))}
