"""Node of the train pipeline."""

from __future__ import annotations

from typing import Any

import pandas as pd

from flatout.engine.parameters import Settings
from flatout.engine.parameters.common import by_path


def train_model(
    *,
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    label_names: list[str],
    tokenizer: Any | None = None,
    **groups: Any,
) -> dict[str, Any]:
    """Train on `train_rows`, validate on `validation_rows` and test on `test_rows`.
    Return the best model, the last model, the train report and the training history.

    The splits are of type `datasets.Dataset`. `tokenizer` is a
    `PreTrainedTokenizerBase`, or None if the rows are not tokens. `groups` are the
    parameter groups. The node resumes from the newest checkpoint in
    `paths.checkpoints`, writes new checkpoints there, and appends to `paths.metrics`.
    """
    # These modules import torch, which earlier pipelines do not need.
    from flatout.engine.launch.launch import launch, make_job
    from flatout.engine.launch.results import load_finished_result
    from flatout.engine.models.model_files import ModelFiles
    from flatout.engine.models.trained_rows import TrainedRows
    from flatout.engine.tokenizing.token_keys import (
        keys_of,
        token_key,
        warn_if_replaced,
    )

    settings = Settings(**groups)
    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    job = make_job(settings, splits, tokenizer, label_names)
    keys, train_key = keys_of(splits), token_key(train_rows)
    result = load_finished_result(job) or launch(job)
    warn_if_replaced(keys, splits)
    rows = TrainedRows.of(train_rows, train_key, settings.runtime.seed)
    parts = (rows,) if tokenizer is None else (tokenizer, rows)
    files = (*parts, ModelFiles(result.model, parts, settings))
    report = {**result.report.as_dict(), "token_key": rows.key}
    return {
        "model": (result.model, *files),
        "last_model": (result.last_model, *files),
        "report": report,
        "summary": pd.DataFrame([_as_line(report)]),
        "history": pd.DataFrame(result.history),
    }


def _as_line(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report as one row of a table. Names of nested values are joined with
    dots, as in `phases_s.model`. A list is a single cell."""
    return {
        name: "; ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in by_path(report)
    }
