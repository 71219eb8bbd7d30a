"""Train with many settings, and select the best ones."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of, parameters
from flatout.pipelines.sweep.nodes import choose_best, compare_settings, run_sweep

GROUPS = ("runtime", "model", "tokenize", "train", "sweep")
COMPARED = parameters("model", "train", "sweep")
"""Parameters that decide which trial is the best."""


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    inputs = {**inputs_of(rows), **parameters(*GROUPS)}
    trials, compared = {"trials": "sweep_trials", **COMPARED}, "sweep_comparison"
    chosen = {"best": "sweep_best", "parameters": "best_parameters"}
    return Pipeline(
        [
            Node(run_sweep, inputs, "sweep_trials", name="run_sweep"),
            Node(
                choose_best,
                {**trials, "this_run": "this_run"},
                chosen,
                name="choose_best",
            ),
            Node(compare_settings, trials, compared, name="compare_settings"),
        ]
    )
