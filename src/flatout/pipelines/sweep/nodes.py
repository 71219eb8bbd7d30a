"""Nodes of the sweep pipeline: parameters in, a table of trainings and the best out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.settings import parse_settings


def run_sweep(
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
    sweep: dict[str, Any],
) -> pd.DataFrame:
    """A line a trial; logs and what a stopped sweep goes on from are in
    `sweep.folder`.

    The splits are `datasets.Dataset`s of token rows, `tokenizer` is a
    `PreTrainedTokenizerBase`.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.engine.jobs.job_files import JobFiles
    from flatout.engine.sweep import sweep as trials
    from flatout.engine.tokenizing.token_keys import check_tokens_match

    settings = parse_settings(
        {
            "runtime": runtime,
            "model": model,
            "tokenize": tokenize,
            "train": training,
            "sweep": sweep,
        }
    )
    splits = {"train": train, "validation": validation, "test": test}
    check_tokens_match(splits, settings, tokenizer, label_names)
    files = JobFiles.of_datasets(
        splits,
        tokenizer,
        label_names,
        Path(settings.sweep.folder) / "rows",
    )
    return pd.DataFrame(trials.run_sweep(settings, files))


def choose_best(trials: pd.DataFrame, sweep: dict[str, Any]) -> dict[str, Any]:
    """Settings of the best trial by `sweep.choose_by`, and the command to train."""
    from flatout.engine.sweep import best

    rows = trials.to_dict("records")
    return best.choose_best(rows, parse_settings({"sweep": sweep}).sweep)
