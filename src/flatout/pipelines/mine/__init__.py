"""Turn pairs into triplets by adding negatives that a saved model finds similar."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines import parameters, splits_of
from flatout.pipelines.mine.nodes import mine_negatives


def create_pipeline(**_: Any) -> Pipeline:
    inputs = {
        "saved": "model",
        "tokenizer": "model_tokenizer",
        **splits_of("rows"),
        "corpus": "mine_corpus",
        **parameters("runtime", "model", "tokenize", "predict", "mine"),
    }
    return Pipeline([Node(mine_negatives, inputs, "triplets", name="mine_negatives")])
