"""Measure trials, analyse them, and write the recommended training settings."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import inputs_of, parameters
from flatout.pipelines.benchmark.nodes import (
    check_trials,
    run_trials,
    show_benchmark,
    write_tuned,
)

GROUPS = ("runtime", "model", "tokenize", "train", "benchmark")


def create_pipeline(rows: str = "tokens", **_: Any) -> Pipeline:
    """Return the pipeline for rows of the kind `rows` (a value of `train.rows`)."""
    inputs = {**inputs_of(rows), **parameters(*GROUPS)}
    trials = {"trials": "benchmark_trials", "summary": "benchmark_summary"}
    results = {**trials, "ladder": "benchmark_ladder"}
    report, tuned = "benchmark_report", "tuned_parameters"
    checked = {**trials, "report": report}
    return Pipeline(
        [
            Node(run_trials, inputs, results, name="run_trials"),
            Node(show_benchmark, results, report, name="show_benchmark"),
            Node(write_tuned, "benchmark_summary", tuned, name="write_tuned"),
            Node(check_trials, checked, None, name="check_trials"),
        ]
    )
