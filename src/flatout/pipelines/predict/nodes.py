"""Nodes of the predict pipeline. They return lazy tables, which are computed one window
of rows at a time while the catalog saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.parameters import Settings


def predict_rows(saved: Any, tokenizer: Any, texts: Any, **groups: Any) -> Any:
    """Predict each row of `texts` with the `saved` model. For a row that cannot be
    predicted, the reason is returned instead. `groups` are the parameter groups. If the
    model has a custom task, its code runs only if `model.task` is set to that task."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict import predicting as engine

    return engine.predict(saved, tokenizer, texts, Settings(**groups))


def predict_samples(saved: Any, samples: Path, kind: str, **groups: Any) -> Any:
    """Predict each sample in `samples`, a file or folder, with the `saved` model.
    `kind` is the value of `train.rows`. `groups` are the parameter groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict import predicting as engine

    return engine.predict_samples(saved, samples, kind, Settings(**groups))
