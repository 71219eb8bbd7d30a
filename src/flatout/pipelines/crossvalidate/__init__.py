"""Token rows -> a training for each fold, and the mean and deviation of its figures."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of
from flatout.pipelines.sweep.nodes import compare_settings, run_sweep
from flatout.pipelines.sweep.pipeline import COMPARED


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    kind, splits = "rows" if rows == "tokens" else rows, ("train", "validation", "test")
    inputs = {
        **inputs_of(rows),
        **{f"{split}_rows": f"{split}_{kind}" for split in splits},
        "sweep": "params:sweep",
        "split": "params:split",
    }
    trials = "crossvalidation_trials"
    compared = {"trials": trials, **COMPARED}
    return Pipeline(
        [
            Node(run_sweep, inputs, trials, name="cross_validate"),
            Node(compare_settings, compared, "crossvalidation", name="compare_folds"),
        ]
    )
