"""Wiring of the sweep pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of
from flatout.pipelines.sweep.nodes import choose_best, run_sweep, show_sweep


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
                    "model": "params:model",
                    "training": "params:train",
                    "sweep": "params:sweep",
                    "this_run": "this_run",
                },
                outputs={"best": "sweep_best", "parameters": "best_parameters"},
                name="choose_best",
            ),
            Node(
                func=show_sweep,
                inputs={
                    "trials": "sweep_trials",
                    "model": "params:model",
                    "training": "params:train",
                    "sweep": "params:sweep",
                },
                outputs={
                    "parallel": "sweep_parallel",
                    "importance": "sweep_importance",
                    "history": "sweep_history",
                },
                name="show_sweep",
            ),
        ]
    )
