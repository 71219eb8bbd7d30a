"""Wiring of the sweep pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.sweep.nodes import choose_best, run_sweep


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=run_sweep,
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
                    "sweep": "params:sweep",
                },
                outputs="sweep_trials",
                name="run_sweep",
            ),
            Node(
                func=choose_best,
                inputs={"trials": "sweep_trials", "sweep": "params:sweep"},
                outputs="sweep_best",
                name="choose_best",
            ),
        ]
    )
