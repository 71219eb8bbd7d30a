"""Nodes of the train pipeline: parameters in, the engine's results out."""

from __future__ import annotations

from typing import Any

import pandas as pd

from flatout.engine.parameters import (
    ModelSettings,
    PathSettings,
    RuntimeSettings,
    Settings,
    TokenizeSettings,
    TrainSettings,
)
from flatout.engine.parameters.common import by_path


def train_model(
    *,
    train: Any,
    validation: Any,
    test: Any,
    label_names: list[str],
    runtime: RuntimeSettings,
    model: ModelSettings,
    tokenize: TokenizeSettings,
    training: TrainSettings,
    paths: PathSettings,
    tokenizer: Any | None = None,
) -> dict[str, Any]:
    """Train on `train`, choose by `validation`, evaluate on `test`.

    The three are `datasets.Dataset`s of rows, `tokenizer` is, for rows of tokens, a
    `PreTrainedTokenizerBase`. Kedro resolves annotations when it starts: with these it
    would import both libraries then.

    `paths.checkpoints` is written and read (resume); `paths.metrics` is appended to.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.engine.launch.launch import launch, make_job
    from flatout.engine.launch.results import take_over
    from flatout.engine.models.merged import AdapterFiles
    from flatout.engine.models.sentence_files import SentenceFiles
    from flatout.engine.models.trained_rows import TrainedRows
    from flatout.engine.tokenizing.token_keys import (
        check_tokens_match,
        keys_of,
        tell_replaced,
        token_key,
    )

    settings = Settings(
        runtime=runtime,
        model=model,
        tokenize=tokenize,
        train=training,
        paths=paths,
    )
    splits = {"train": train, "validation": validation, "test": test}
    if tokenizer is not None:
        check_tokens_match(splits, settings, tokenizer, label_names)
    keys, train_key = keys_of(splits), token_key(train)
    job = make_job(settings, splits, tokenizer, label_names)
    result = take_over(job) or launch(job)
    tell_replaced(keys, splits)
    rows = TrainedRows.of(train, train_key, runtime.seed)
    beside = (rows,) if tokenizer is None else (tokenizer, rows)
    beside += SentenceFiles.of(result.model.config, tokenize.max_length)
    beside += AdapterFiles.of(result.model, beside, model)
    report = {**result.report.as_dict(), "token_key": rows.key}
    return {
        "model": (result.model, *beside),
        "last_model": (result.last_model, *beside),
        "report": report,
        "summary": pd.DataFrame([_as_line(report)]),
        "history": pd.DataFrame(result.history),
    }


def _as_line(report: dict[str, Any]) -> dict[str, Any]:
    """One column per figure, `phases_s.model` for a group; lists in one cell."""
    return {
        name: "; ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in by_path(report)
    }
