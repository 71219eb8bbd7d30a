"""Nodes of the predict pipeline: a recipe, which the catalog's dataset carries out a
window of rows at a time."""

from __future__ import annotations

from typing import Any

from flatout.engine.settings import parse_settings


def predict_rows(
    model: Any,
    tokenizer: Any,
    texts: Any,
    runtime: dict[str, Any],
    tokenize: dict[str, Any],
    predict: dict[str, Any],
) -> Any:
    """A prediction for each row of `texts`; rows that cannot be used say why."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine import predict as engine

    settings = parse_settings(
        {"runtime": runtime, "tokenize": tokenize, "predict": predict}
    )
    return engine.predict(model, tokenizer, texts, settings)
