"""Nodes of the benchmark pipeline, which return tables and a recommendation."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)


def run_trials(
    *,
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    label_names: list[str],
    tokenizer: Any | None = None,
    **groups: Any,
) -> dict[str, Any]:
    """Measure trials in separate processes, and return the table of trials, the table
    of ladder rungs, and a summary. The logs are stored in `benchmark.folder`.

    The splits are of type `datasets.Dataset`. `tokenizer` is a
    `PreTrainedTokenizerBase`, or None if the rows are not tokens. `groups` are the
    parameter groups.
    """
    # These modules import torch, which earlier pipelines do not need.
    from flatout.engine.benchmark.outcome import summarise
    from flatout.engine.launch.job_files import JobFiles, token_key
    from flatout.engine.launch.launch import make_job
    from flatout.reports.answer import answer
    from flatout.reports.console import search_watched

    settings = Settings(**groups)
    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    folder = Path(settings.benchmark.folder)
    job = make_job(settings, splits, tokenizer, label_names)
    files = JobFiles.of(job, folder / "rows", token_key(job.train))
    search = search_watched(settings, files)
    ladder = pd.DataFrame([asdict(step) for step in search.ladder])
    trials = pd.DataFrame([trial.as_row() for trial in search.bench.results])
    summary = summarise(search)
    summary["answer"] = answer(summary, ladder)
    logger.info(summary["answer"])
    return {"trials": trials, "ladder": ladder, "summary": summary}


def write_tuned(summary: dict[str, Any]) -> str:
    """Return the text of conf/tuned/parameters.yml, or "" if nothing is recommended."""
    from flatout.reports.tuned import parameters_text

    return parameters_text(summary)


def show_benchmark(
    trials: pd.DataFrame, summary: dict[str, Any], ladder: pd.DataFrame
) -> str:
    """Return the benchmark's report as Markdown."""
    from flatout.reports.report import report_text

    return report_text(summary, trials, ladder)


def check_trials(trials: pd.DataFrame, summary: dict[str, Any], report: str) -> None:
    """Raise BenchmarkError if all training trials failed. `report` is an input only to
    ensure that the report is saved before this node runs."""
    from flatout.engine.benchmark.outcome import BenchmarkError
    from flatout.reports.report import failure_text

    trained = trials[trials["kind"] != "loader"]
    if len(trained) and not (trained["status"] == "ok").any():
        failure = failure_text(summary["failed"] or trained.iloc[0].to_dict())
        raise BenchmarkError(
            f"no training could be measured, {len(trained)} were tried, see "
            f"benchmark_report.md. {failure}"
        )
