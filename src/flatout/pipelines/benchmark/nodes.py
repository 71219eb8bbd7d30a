"""Nodes of the benchmark pipeline: parameters in, tables and advice out."""

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
    """Measure trials in separate processes; logs go under `benchmark.folder`.

    The splits are `datasets.Dataset`s of rows, and `tokenizer` is, for rows of
    tokens, a `PreTrainedTokenizerBase`. `groups`: parameters by group.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.engine.benchmark.outcome import summarise
    from flatout.engine.launch.job_files import JobFiles, token_key
    from flatout.engine.launch.launch import make_job
    from flatout.reports.answer import answer
    from flatout.reports.console import search_watched, show_findings

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
    show_findings(summary, ladder)
    return {"trials": trials, "ladder": ladder, "summary": summary}


def write_tuned(summary: dict[str, Any]) -> str:
    """Text of the tuned environment's parameters; empty without a recommendation."""
    from flatout.reports.tuned import parameters_text

    return parameters_text(summary)


def show_benchmark(
    trials: pd.DataFrame, summary: dict[str, Any], ladder: pd.DataFrame
) -> str:
    """Return a page of Markdown."""
    from flatout.reports.report import report_text

    return report_text(summary, trials, ladder)


def check_trials(trials: pd.DataFrame, summary: dict[str, Any], report: str) -> None:
    """Run after `report`, which is saved by then. Raises BenchmarkError if trials ran
    and all of them failed."""
    from flatout.engine.benchmark.outcome import BenchmarkError
    from flatout.reports.report import failure_text

    trained = trials[trials["kind"] != "loader"]
    if len(trained) and not (trained["status"] == "ok").any():
        failure = failure_text(summary["failed"] or trained.iloc[0].to_dict())
        raise BenchmarkError(
            f"no training could be measured, {len(trained)} were tried and are in "
            f"benchmark_report.md. {failure}"
        )
