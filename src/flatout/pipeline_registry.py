"""Register all pipelines, and define the default pipeline of `kedro run`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from kedro.framework.project import find_pipelines
from kedro.pipeline import Pipeline

from flatout import pipelines as folder
from flatout.pipelines import boxed

DEFAULT = ("split", "tokenize", "train", "evaluate")


def register_pipelines() -> dict[str, Pipeline]:
    """Return all pipelines in `pipelines/`, or those selected by `--pipelines`."""
    found = find_pipelines(raise_errors=True)
    pipelines = {name: boxed(name, pipeline) for name, pipeline in found.items()}
    default = [pipelines[name] for name in DEFAULT if name in pipelines]
    return {**pipelines, "__default__": sum(default, start=Pipeline([]))}


def flatout_pipelines(
    namespace: str | None = None, **options: Any
) -> dict[str, Pipeline]:
    """Return all flatout pipelines by name, for the registry of another project. If
    `namespace` is given, the nodes get this namespace, but catalog entries and
    parameters keep their names. `options` are passed to `create_pipeline`, for example
    `rows="images"`."""
    found = {}
    for name in (one.name for one in iter_modules(folder.__path__) if one.ispkg):
        module = import_module(f"{folder.__name__}.{name}")
        inner = boxed(name, module.create_pipeline(**options))
        found[name] = Pipeline(
            inner, namespace=namespace, prefix_datasets_with_namespace=False
        )
    return found
