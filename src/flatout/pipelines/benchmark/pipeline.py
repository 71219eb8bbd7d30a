"""Wiring of the benchmark pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of
from flatout.pipelines.benchmark.nodes import (
    check_trials,
    run_trials,
    show_benchmark,
    write_tuned,
)


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline. `rows`: the kind of a sample, the value of `train.rows`."""
    return Pipeline(
        [
            Node(
                func=run_trials,
                inputs={**inputs_of(rows), "benchmark": "params:benchmark"},
                outputs={
                    "trials": "benchmark_trials",
                    "ladder": "benchmark_ladder",
                    "summary": "benchmark_summary",
                },
                name="run_trials",
            ),
            Node(
                func=show_benchmark,
                inputs={
                    "trials": "benchmark_trials",
                    "summary": "benchmark_summary",
                    "ladder": "benchmark_ladder",
                },
                outputs="benchmark_report",
                name="show_benchmark",
            ),
            Node(
                func=write_tuned,
                inputs={"summary": "benchmark_summary"},
                outputs="tuned_parameters",
                name="write_tuned",
            ),
            Node(
                func=check_trials,
                inputs={
                    "trials": "benchmark_trials",
                    "summary": "benchmark_summary",
                    "report": "benchmark_report",
                },
                outputs=None,
                name="check_trials",
            ),
        ]
    )
