"""Nodes of the mine pipeline: a recipe, which the catalog's dataset carries out."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import (
    MineSettings,
    ModelSettings,
    PredictSettings,
    RuntimeSettings,
    Settings,
    TokenizeSettings,
)


def mine_negatives(
    model: Any,
    tokenizer: Any,
    train: Any,
    validation: Any,
    test: Any,
    corpus: Any,
    runtime: RuntimeSettings,
    trained: ModelSettings,
    tokenize: TokenizeSettings,
    predict: PredictSettings,
    mine: MineSettings,
) -> Any:
    """Find negatives in `corpus` for each pair of `train`; pairs of the other splits
    are passed on."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import mining as engine

    settings = Settings(
        runtime=runtime, model=trained, tokenize=tokenize, predict=predict, mine=mine
    )
    splits = {"train": train, "validation": validation, "test": test}
    return engine.mine(model, tokenizer, splits, corpus, settings)
