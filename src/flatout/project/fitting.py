"""Adjust the registered pipelines to the parameters of an environment."""

from __future__ import annotations

from importlib import import_module

from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from flatout.engine.parameters import Settings
from flatout.engine.rows import row_kind
from flatout.pipelines import boxed

OF_ROWS = (
    *("train", "evaluate", "predict", "export"),
    *("benchmark", "sweep", "crossvalidate"),
)
"""Pipelines whose inputs depend on the kind of rows (`train.rows`)."""
TRAINING_NODES = frozenset({"train_model", "run_trials", "run_sweep", "cross_validate"})
"""Nodes that must not run in a parallel runner, because they start processes."""
OF_SESSIONS = "next-key"
"""The task that learns from sessions instead of texts."""


def raw_entry(settings: Settings) -> str:
    """Return the name of the catalog entry with the raw data for this configuration."""
    kind = row_kind(settings.train.rows).kind
    if kind != "tokens":
        return f"raw_{kind}"
    return "raw_sessions" if settings.model.task == OF_SESSIONS else "raw_texts"


def short_names(pipeline: Pipeline) -> set[str]:
    """Return the names of the nodes without their namespace."""
    return {node.short_name for node in pipeline.nodes}


def fit_pipelines(settings: Settings) -> None:
    """Make the registered pipelines read rows of the configured kind. If the parameter
    `pipelines` is set, the default pipeline is the sum of these pipelines. Raises
    SettingsError if there are no rows of this kind."""
    kind, raw = row_kind(settings.train.rows).kind, raw_entry(settings)
    for name in OF_ROWS if kind != "tokens" else ():
        _fit(name, rows=kind)
    if kind == "tokens":
        _fit("split", raw=raw)
    named = [pipelines[name] for name in settings.pipelines if name in pipelines]
    if named:
        pipelines["__default__"] = sum(named, start=Pipeline([]))


def _fit(name: str, **options: str) -> None:
    """Create the registered pipeline `name` again with `options`, in the same
    namespace. A pipeline that the project defines itself is left unchanged."""
    nodes = pipelines[name].nodes if name in pipelines else []
    if nodes and nodes[0].func.__module__.startswith("flatout.pipelines."):
        made = import_module(f"flatout.pipelines.{name}").create_pipeline(**options)
        pipelines[name] = boxed(nodes[0].namespace or name, made)
