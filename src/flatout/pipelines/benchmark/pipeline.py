"""Wiring of the benchmark pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.benchmark.nodes import run_trials


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=run_trials,
                inputs={
                    "train": "train_tokens",
                    "validation": "validation_tokens",
                    "test": "test_tokens",
                    "tokenizer": "tokenizer",
                    "label_names": "label_names",
                    "runtime": "params:runtime",
                    "model": "params:model",
                    "tokenize": "params:tokenize",
                    "training": "params:train",
                    "benchmark": "params:benchmark",
                },
                outputs="benchmark_trials",
                name="run_trials",
            )
        ]
    )
