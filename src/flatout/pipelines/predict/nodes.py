"""Nodes of the predict pipeline: a recipe, which the catalog's dataset carries out one
window of rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.parameters import Settings


def predict_rows(saved: Any, tokenizer: Any, texts: Any, **groups: Any) -> Any:
    """Predict each row of `texts` by the `saved` model; unusable rows get a reason.
    Code of a custom task runs only if the parameters, by group, name it."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import predicting as engine

    return engine.predict(saved, tokenizer, texts, Settings(**groups))


def predict_samples(saved: Any, samples: Path, kind: str, **groups: Any) -> Any:
    """Predict each sample in `samples`, a file or a folder. `kind`: the value of
    `train.rows`."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import predicting as engine

    return engine.predict_samples(saved, samples, kind, Settings(**groups))
