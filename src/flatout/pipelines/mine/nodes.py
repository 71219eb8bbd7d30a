"""Node of the mine pipeline, which returns a recipe that the dataset executes."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import Settings


def mine_negatives(
    saved: Any,
    tokenizer: Any,
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    corpus: Any,
    **groups: Any,
) -> Any:
    """Use the `saved` model to find negatives in `corpus` for each pair of the training
    split. Pairs of other splits are returned unchanged. `groups` are the parameter
    groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict import mining as engine

    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    return engine.mine(saved, tokenizer, splits, corpus, Settings(**groups))
