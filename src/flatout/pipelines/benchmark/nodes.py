"""Nodes of the benchmark pipeline: parameters in, tables and advice out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from flatout.engine.settings import parse_settings

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def run_trials(
    *,
    train: Dataset,
    validation: Dataset,
    test: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    label_names: list[str],
    runtime: dict[str, Any],
    model: dict[str, Any],
    tokenize: dict[str, Any],
    training: dict[str, Any],
    benchmark: dict[str, Any],
) -> pd.DataFrame:
    """Measure trials in processes of their own; logs go under `benchmark.folder`."""
    from flatout.benchmarks.console import TrialTable
    from flatout.engine.job_files import JobFiles
    from flatout.engine.model import Vocabulary
    from flatout.engine.search import search
    from flatout.engine.tokens import TokenRows

    settings = parse_settings(
        {
            "runtime": runtime,
            "model": model,
            "tokenize": tokenize,
            "train": training,
            "benchmark": benchmark,
        }
    )
    splits = {"train": train, "validation": validation, "test": test}
    files = JobFiles.of(
        {name: TokenRows.from_dataset(rows) for name, rows in splits.items()},
        Vocabulary.of(tokenizer),
        label_names,
        Path(settings.benchmark.folder) / "rows",
    )
    with TrialTable() as watcher:
        bench = search(settings, files, watcher)
    return pd.DataFrame(bench.results)
