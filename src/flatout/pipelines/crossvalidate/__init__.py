"""Train once per fold, and compute the mean and standard deviation of the metrics."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import SPLITS, inputs_of, parameters
from flatout.pipelines.sweep import COMPARED, GROUPS
from flatout.pipelines.sweep.nodes import compare_settings, run_sweep


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    kind = "rows" if rows == "tokens" else rows
    folds = {f"{split}_folds": f"{split}_{kind}" for split in SPLITS}
    inputs = {**inputs_of(rows), **folds, **parameters(*GROUPS, "split")}
    trials, table = "crossvalidation_trials", "crossvalidation"
    compared = {"trials": trials, **COMPARED}
    train = Node(run_sweep, inputs, trials, name="cross_validate")
    compare = Node(compare_settings, compared, table, name="compare_folds")
    return Pipeline([train, compare])
