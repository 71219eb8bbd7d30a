"""Nodes of the sweep pipeline: parameters in, a table of trainings and the best out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.parameters import (
    ModelSettings,
    RuntimeSettings,
    Settings,
    SplitSettings,
    SweepSettings,
    TokenizeSettings,
    TrainSettings,
)

NO_FOLDS = SplitSettings()


def run_sweep(
    *,
    train: Any,
    validation: Any,
    test: Any,
    label_names: list[str],
    runtime: RuntimeSettings,
    model: ModelSettings,
    tokenize: TokenizeSettings,
    training: TrainSettings,
    sweep: SweepSettings,
    tokenizer: Any | None = None,
    split: SplitSettings = NO_FOLDS,
    train_rows: Any = None,
    validation_rows: Any = None,
    test_rows: Any = None,
) -> pd.DataFrame:
    """Return one line per trial; with `train_rows` and the others, one per fold in
    their column `fold`. Logs and the state to resume a stopped sweep are in
    `sweep.folder`.

    The splits are `datasets.Dataset`s of rows, `tokenizer` is, for rows of tokens, a
    `PreTrainedTokenizerBase`.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.engine.launch.job_files import JobFiles
    from flatout.engine.sweep import sweep as trials

    settings = Settings(
        runtime=runtime,
        model=model,
        tokenize=tokenize,
        train=training,
        sweep=sweep,
    )
    splits = {"train": train, "validation": validation, "test": test}
    folder = settings.sweep.folder
    files = JobFiles.checked(settings, splits, tokenizer, label_names, folder)
    if train_rows is None:
        return pd.DataFrame(trials.run_sweep(settings, files))
    from flatout.engine.sweep.folds import fold_files

    rows = [train_rows, validation_rows, test_rows]
    folds = fold_files(files, rows, split.folds, Path(folder) / "rows")
    return pd.DataFrame(trials.run_sweep(settings, files, folds))


def choose_best(
    trials: pd.DataFrame,
    model: ModelSettings,
    training: TrainSettings,
    sweep: SweepSettings,
    this_run: Mapping[str, Any],
) -> dict[str, Any]:
    """`best`: settings of the best trial by `sweep.choose_by`, and the command that
    trains with them. `parameters`: the text of conf/best/parameters.yml. `this_run` has
    the `environment` of the sweep, None for that of the project."""
    from flatout.engine.sweep import best
    from flatout.reports.tuned import best_text

    rows = trials.to_dict("records")
    settings = Settings(model=model, train=training, sweep=sweep)
    found = best.choose_best(rows, settings, this_run["environment"])
    return {"best": found, "parameters": best_text(found)}


def compare_settings(
    trials: pd.DataFrame,
    model: ModelSettings,
    training: TrainSettings,
    sweep: SweepSettings,
) -> pd.DataFrame:
    """Return one line per setting: mean, deviation, and difference from the best."""
    from flatout.engine.sweep.best import compare

    settings = Settings(model=model, train=training, sweep=sweep)
    return pd.DataFrame(compare(trials.to_dict("records"), settings))
