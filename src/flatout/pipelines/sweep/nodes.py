"""Nodes of the sweep pipeline, which return a table of trials and the best trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.parameters import Settings


def run_sweep(
    *,
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    label_names: list[str],
    tokenizer: Any | None = None,
    train_folds: Any = None,
    validation_folds: Any = None,
    test_folds: Any = None,
    **groups: Any,
) -> pd.DataFrame:
    """Train all trials, and return a table with one row per trial. If folds are given,
    each trial trains once per fold, and the table has one row per trial and fold.
    `sweep.folder` contains the logs, and the state from which a stopped sweep resumes.

    The splits are of type `datasets.Dataset`. `tokenizer` is a
    `PreTrainedTokenizerBase`, or None if the rows are not tokens. `groups` are the
    parameter groups.
    """
    # These modules import torch, which earlier pipelines do not need.
    from flatout.engine.launch.job_files import JobFiles, token_key
    from flatout.engine.launch.launch import make_job
    from flatout.engine.sweep import sweep as trials

    settings = Settings(**groups)
    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    folder = Path(settings.sweep.folder)
    job = make_job(settings, splits, tokenizer, label_names)
    files = JobFiles.of(job, folder / "rows", token_key(job.train))
    if train_folds is None:
        return pd.DataFrame(trials.run_sweep(settings, files))
    from flatout.engine.sweep.folds import fold_files

    rows = [train_folds, validation_folds, test_folds]
    folds = fold_files(files, rows, settings.split.folds, folder / "rows")
    return pd.DataFrame(trials.run_sweep(settings, files, folds))


def choose_best(
    trials: pd.DataFrame, this_run: Mapping[str, Any], **groups: Any
) -> dict[str, Any]:
    """Choose the best trial by `sweep.choose_by`. The result `best` has the settings
    and the command that trains with them, and `parameters` is the text of
    conf/best/parameters.yml. `this_run` contains the sweep's `environment` (None for
    the default environment)."""
    from flatout.engine.sweep import best
    from flatout.reports.tuned import best_text

    rows, settings = trials.to_dict("records"), Settings(**groups)
    found = best.choose_best(rows, settings, this_run["environment"])
    return {"best": found, "parameters": best_text(found)}


def compare_settings(trials: pd.DataFrame, **groups: Any) -> pd.DataFrame:
    """Return a table with the mean and standard deviation of the metric for each
    combination of settings, and the difference from the best combination."""
    from flatout.engine.sweep.best import compare

    return pd.DataFrame(compare(trials.to_dict("records"), Settings(**groups)))
