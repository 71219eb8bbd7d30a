"""Nodes of the predict pipeline: a recipe, which the catalog's dataset carries out one
window of rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.parameters import (
    ArraySettings,
    ImageSettings,
    ModelSettings,
    PredictSettings,
    RuntimeSettings,
    Settings,
    SplitSettings,
    TokenizeSettings,
)


def predict_rows(
    model: Any,
    tokenizer: Any,
    texts: Any,
    model_settings: ModelSettings,
    runtime: RuntimeSettings,
    split: SplitSettings,
    tokenize: TokenizeSettings,
    predict: PredictSettings,
) -> Any:
    """Predict each row of `texts`; unusable rows get a reason. Code of a custom task
    runs only if `model_settings` names it."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import predicting as engine

    settings = Settings(
        model=model_settings,
        runtime=runtime,
        split=split,
        tokenize=tokenize,
        predict=predict,
    )
    return engine.predict(model, tokenizer, texts, settings)


def predict_samples(
    model: Any,
    samples: Path,
    kind: str,
    model_settings: ModelSettings,
    runtime: RuntimeSettings,
    split: SplitSettings,
    arrays: ArraySettings,
    images: ImageSettings,
    predict: PredictSettings,
) -> Any:
    """Predict each sample in `samples`, a file or a folder. `kind`: the value of
    `train.rows`."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import sample_predictions as engine

    settings = Settings(
        model=model_settings,
        runtime=runtime,
        split=split,
        arrays=arrays,
        images=images,
        predict=predict,
    )
    return engine.predict_samples(model, samples, kind, settings)
