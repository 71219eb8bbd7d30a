"""Node of the mine pipeline: a recipe, which the catalog's dataset carries out."""

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
    """Find negatives in `corpus` for each pair of train by the `saved` model; pairs of
    the other splits are passed on. `groups`: parameters by group."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import mining as engine

    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    return engine.mine(saved, tokenizer, splits, corpus, Settings(**groups))
