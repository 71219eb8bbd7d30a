"""Wiring of the sweep pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of
from flatout.pipelines.sweep.nodes import (
    choose_best,
    compare_settings,
    run_sweep,
)

COMPARED = {
    "model": "params:model",
    "training": "params:train",
    "sweep": "params:sweep",
}
"""Parameters that decide which trial is the best."""


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    return Pipeline(
        [
            Node(
                func=run_sweep,
                inputs={**inputs_of(rows), "sweep": "params:sweep"},
                outputs="sweep_trials",
                name="run_sweep",
            ),
            Node(
                func=choose_best,
                inputs={
                    "trials": "sweep_trials",
                    **COMPARED,
                    "this_run": "this_run",
                },
                outputs={"best": "sweep_best", "parameters": "best_parameters"},
                name="choose_best",
            ),
            Node(
                func=compare_settings,
                inputs={"trials": "sweep_trials", **COMPARED},
                outputs="sweep_comparison",
                name="compare_settings",
            ),
        ]
    )
