"""Node of the mine pipeline. It adds negatives to the pairs of the training split."""

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
    """Return the pairs of the training split with negatives that the `saved` model
    finds in `corpus`, and the unchanged pairs of the other splits. The negatives are
    found while the result is saved. `groups` are the parameter groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict import mining as engine

    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    return engine.mine(saved, tokenizer, splits, corpus, Settings(**groups))
