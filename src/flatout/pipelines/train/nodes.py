"""Nodes of the train pipeline: parameters in, the engine's results out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.settings import parse_settings


def train_model(
    *,
    train: Any,
    validation: Any,
    test: Any,
    tokenizer: Any,
    label_names: list[str],
    runtime: dict[str, Any],
    model: dict[str, Any],
    tokenize: dict[str, Any],
    training: dict[str, Any],
    paths: dict[str, Any],
) -> dict[str, Any]:
    """Train on `train`, choose by `validation`, judge on `test`.

    The three are `datasets.Dataset`s of token rows, `tokenizer` is a
    `PreTrainedTokenizerBase`. Kedro resolves annotations when it starts: with these it
    would import both libraries then.

    `paths.checkpoints` is written and read (resume); `paths.metrics` is appended to.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.engine.jobs.launch import run_training
    from flatout.engine.tokenizing.token_keys import check_tokens_match

    settings = parse_settings(
        {
            "runtime": runtime,
            "model": model,
            "tokenize": tokenize,
            "train": training,
            "paths": paths,
        }
    )
    splits = {"train": train, "validation": validation, "test": test}
    check_tokens_match(splits, settings, tokenizer, label_names)
    folder = Path(settings.paths.checkpoints)
    result = run_training(
        settings, train, validation, test, tokenizer, label_names, folder
    )
    return {
        "model": (result.model, tokenizer),
        "last_model": (result.last_model, tokenizer),
        "report": asdict(result.report),
        "history": pd.DataFrame(result.history),
        "confusion": result.confusion,
    }
