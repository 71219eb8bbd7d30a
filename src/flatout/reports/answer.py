"""Summarise the result of a benchmark in one sentence, with the next command to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flatout.reports.markdown import number_text
from flatout.reports.tuned import interval_text

Summary = Mapping[str, Any]


def answer(summary: Summary, steps: pd.DataFrame) -> str:
    """Return the main result of a benchmark in one sentence. `steps` is the table of
    ladder rungs."""
    is_ladder = summary["mode"] == "ladder"
    return _ladder(steps) if is_ladder else _recommendation(summary)


def _recommendation(summary: Summary) -> str:
    verdict, tuned, failed = summary["verdict"], summary["tuned"], summary["failed"]
    bound = f"Bound by: {verdict['bound']}. " if verdict else ""
    if failed:
        why = f": {failed['note'].rstrip('.')}" if failed["status"] == "error" else ""
        return f"No recommendation: trial {failed['trial_id']} {failed['status']}{why}."
    if not tuned:
        why = "no settings leave benchmark.memory_headroom free"
        return f"{bound}No recommendation: {why}."
    source = tuned["provenance"]
    rate, before = source["samples_per_s"], source["samples_per_s_before"]
    if not tuned["gained"]:
        return (
            f"{bound}No measured settings are faster than the configured ones, "
            f"{number_text(before)} samples/s{interval_text(source)}."
        )
    gain = f" instead of {number_text(before)} ({rate / before:.2f}x)" if before else ""
    return (
        f"{bound}Tuned settings are in conf/tuned: {number_text(rate)} samples/s"
        f"{interval_text(source)}{gain}{_batch(summary)}. Train with them: kedro "
        "run --env=tuned, with the same --params."
    )


def _batch(summary: Summary) -> str:
    if not summary["tuned"]["changes_optimisation"]:
        return ""
    to = summary["tuned"]["parameters"]["train"]["global_batch_size"]
    return (
        f", with global batch {to} instead of {summary['global_batch_size']}, which "
        "changes the optimisation"
    )


def _ladder(steps: pd.DataFrame) -> str:
    rungs = [r for r in steps.to_dict("records") if r["kept"] and r["status"] == "ok"]
    if not rungs:
        return "No rung of the ladder was measured to its end."
    gains = [row for row in rungs if row["individual"] and row["individual"] > 0]
    top = max(gains, key=lambda row: float(row["individual"]), default=None)
    largest = ""
    if top:
        largest = f"; the largest step is {top['name']} ({top['individual']:.2f}x)"
    rate, times = rungs[-1]["samples_per_s"], rungs[-1]["cumulative"]
    return (
        f"All kept optimisations together give {number_text(times)} times conf/slow, "
        f"{number_text(rate)} samples/s{largest}."
    )
