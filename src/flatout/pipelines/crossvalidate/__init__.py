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
    inputs = {
        **inputs_of(rows),
        **{f"{split}_folds": f"{split}_{kind}" for split in SPLITS},
        **parameters(*GROUPS, "split"),
    }
    trials = "crossvalidation_trials"
    compared = {"trials": trials, **COMPARED}
    return Pipeline(
        [
            Node(run_sweep, inputs, trials, name="cross_validate"),
            Node(compare_settings, compared, "crossvalidation", name="compare_folds"),
        ]
    )
