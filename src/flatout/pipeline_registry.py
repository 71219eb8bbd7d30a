"""The registered pipelines, and those that `kedro run` runs by default."""

from __future__ import annotations

from kedro.framework.project import find_pipelines
from kedro.pipeline import Pipeline

from flatout.pipelines import boxed

DEFAULT = ("split", "tokenize", "train", "evaluate")


def register_pipelines() -> dict[str, Pipeline]:
    """Return every folder of `pipelines/`; with `--pipelines`, only the named ones."""
    found = find_pipelines(raise_errors=True)
    pipelines = {name: boxed(name, pipeline) for name, pipeline in found.items()}
    default = [pipelines[name] for name in DEFAULT if name in pipelines]
    return {**pipelines, "__default__": sum(default, start=Pipeline([]))}
