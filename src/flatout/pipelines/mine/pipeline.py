"""Wiring of the mine pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.mine.nodes import mine_negatives


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=mine_negatives,
                inputs={
                    "model": "model",
                    "tokenizer": "model_tokenizer",
                    "train": "train_rows",
                    "validation": "validation_rows",
                    "test": "test_rows",
                    "corpus": "mine_corpus",
                    "runtime": "params:runtime",
                    "trained": "params:model",
                    "tokenize": "params:tokenize",
                    "predict": "params:predict",
                    "mine": "params:mine",
                },
                outputs="triplets",
                name="mine_negatives",
            )
        ]
    )
