"""Pipelines as the parameters of an environment have them."""

from __future__ import annotations

from importlib import import_module

from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from flatout.engine.parameters import Settings

OF_ROWS = ("train", "evaluate", "predict", "benchmark", "sweep")
"""Those whose inputs have the name of what a sample is, as `train.rows` says."""


def fit_pipelines(settings: Settings) -> None:
    """Let the project's pipelines read such rows, and the default one be those that the
    parameter `pipelines` names, from now on."""
    kind = settings.train.rows
    for name in OF_ROWS if kind != "tokens" else ():
        if name in pipelines:
            module = import_module(f"flatout.pipelines.{name}")
            pipelines[name] = module.create_pipeline(rows=kind)
    named = [pipelines[name] for name in settings.pipelines if name in pipelines]
    if named:
        pipelines["__default__"] = sum(named, start=Pipeline([]))
