"""Summarise a training run or an evaluation in a few lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flatout.engine.benchmark.verdict import IO_LIMIT_SHARE

MOST_FIGURES = 3
SHOWN_NAMES = 10
MAJORITY = "majority_accuracy"
NEXT = {
    "kedro run --pipelines=predict": "applies the model",
    "kedro run --pipelines=benchmark": "finds faster settings",
    "kedro flatout ui": "shows the runs",
}

Report = Mapping[str, Any]


def summary_lines(
    trained: Report | None,
    judged: Report | None,
    places: Mapping[str, str],
    metric: str | None = None,
    run_options: str = "",
    data_option: str = "",
) -> list[str]:
    """Return the lines to print. `trained` and `judged` are the train report and the
    evaluation report, or None. `places` maps names to the paths of the model and of the
    train report. `metric` is the parameter `train.metric`. `run_options` is appended to
    suggested `kedro run` commands, and `data_option` to `kedro flatout` commands."""
    rows = [*_of_training(trained, metric), *_of_evaluation(judged, metric)]
    if trained:
        if not judged:
            rows.append(("test", _figures(trained, "test_", metric)))
        rows += places.items()
        rows += _next(trained, run_options, data_option)
    return [f"{name:<12}{text}" for name, text in rows if text]


def _of_training(
    report: Report | None, metric: str | None
) -> Iterator[tuple[str, str]]:
    if report:
        peak = f"peak {report['peak_reserved_gib']:.1f} GiB"
        yield "trained", f"{report['steps']:,} steps{_rate(report)}, {peak}"
        yield "validation", _figures(report, "validation_", metric)


def _rate(report: Report) -> str:
    """Return the training throughput as text for the end of a sentence."""
    waits, rate = report["loader_wait_pct"], report["samples_per_s"]
    if math.isnan(rate):
        return ", too few for a rate"
    bound = "loader" if waits >= 100 * IO_LIMIT_SHARE else "compute"
    return f" at {rate:,.0f} samples/s, {bound}-bound (loader wait {waits:.1f} %)"


def _of_evaluation(
    report: Report | None, metric: str | None
) -> Iterator[tuple[str, str]]:
    if report:
        yield report["split"], _figures(report, "", metric)
        if MAJORITY in report:
            most, share = report["majority_label"], report[MAJORITY]
            yield "", f"accuracy {share:.4f} by always predicting {most!r}"
        if never := report.get("never_predicted"):
            more = f" and {len(never) - SHOWN_NAMES} more" * (len(never) > SHOWN_NAMES)
            names = ", ".join(map(str, never[:SHOWN_NAMES]))
            yield "", f"never predicted: {names}{more}"


def _next(trained: Report, run: str, others: str) -> Iterator[tuple[str, str]]:
    known = list(NEXT.items())
    if any("perplexity" in name for name in trained):  # predict rejects such models
        known = known[1:]
    for number, (command, purpose) in enumerate(known):
        full = command + (run if command.startswith("kedro run") else others)
        yield "" if number else "next", f"{full:<{33 + len(run)}}{purpose}"


def _figures(report: Report, prefix: str, metric: str | None) -> str:
    """Return up to MOST_FIGURES metrics with the given prefix as text: the loss,
    `metric`, and other metrics in the order of the report."""
    named = {
        name.removeprefix(prefix): value
        for name, value in report.items()
        if name.startswith(prefix) and isinstance(value, float) and name != MAJORITY
    }
    first = dict.fromkeys(["loss", *([metric] if metric else []), *named])
    shown = [name for name in first if name in named][:MOST_FIGURES]
    return "  ".join(f"{name} {named[name]:.4f}" for name in shown)
