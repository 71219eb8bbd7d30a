"""Nodes of the benchmark pipeline: parameters in, tables and advice out."""

from __future__ import annotations

import logging
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.jobs.signals import Interrupted
from flatout.engine.settings import parse_settings

logger = logging.getLogger(__name__)


def run_trials(
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
    benchmark: dict[str, Any],
) -> dict[str, Any]:
    """Measure trials in processes of their own; logs go under `benchmark.folder`.

    The splits are `datasets.Dataset`s of token rows, `tokenizer` is a
    `PreTrainedTokenizerBase`.
    """
    # Imports torch, which the pipelines before this one do not need.
    from flatout.benchmarks.console import TrialTable, show_findings
    from flatout.benchmarks.report import findings_text
    from flatout.engine.bench.outcome import summarise
    from flatout.engine.bench.search import search
    from flatout.engine.jobs.job_files import JobFiles
    from flatout.engine.tokenizing.token_keys import check_tokens_match

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
    check_tokens_match(splits, settings, tokenizer, label_names)
    files = JobFiles.of_datasets(
        splits,
        tokenizer,
        label_names,
        Path(settings.benchmark.folder) / "rows",
    )
    try:
        with TrialTable() as watcher:
            sweep = search(settings, files, watcher)
    except KeyboardInterrupt as error:
        raise _interrupted(len(watcher.trials)) from error
    summary = summarise(sweep)
    ladder = pd.DataFrame([asdict(step) for step in sweep.ladder])
    trials = pd.DataFrame(sweep.bench.results)
    show_findings(findings_text(summary, trials, ladder))
    return {"trials": trials, "ladder": ladder, "summary": summary}


def _interrupted(done: int) -> Interrupted:
    """Ctrl-C has ended a sweep: what it has measured is kept."""
    from flatout.benchmarks.markdown import counted

    trials = counted(done, "trial")
    logger.warning(
        "Interrupted: %s done; the same command goes on with the rest", trials
    )
    return Interrupted(signal.SIGINT)


def write_tuned(summary: dict[str, Any]) -> str:
    """Text of the tuned environment's parameters; empty where none are recommended."""
    from flatout.benchmarks.tuned import parameters_text

    return parameters_text(summary)


def show_benchmark(
    trials: pd.DataFrame, summary: dict[str, Any], ladder: pd.DataFrame
) -> dict[str, Any]:
    """Four figures and a page of Markdown."""
    from flatout.benchmarks.figures import all_figures
    from flatout.benchmarks.report import report_text

    figures = all_figures(trials, summary, ladder)
    return {**figures, "report": report_text(summary, trials, ladder)}
