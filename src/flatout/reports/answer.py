"""The benchmark's answer: one sentence, and what to do with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from flatout.reports.comparisons import loader_answer
from flatout.reports.markdown import counted, number_text
from flatout.reports.tuned import interval_text

Summary = Mapping[str, Any]


def answer(summary: Summary, trials: pd.DataFrame, steps: pd.DataFrame) -> str:
    """Return the main result of a benchmark in one sentence."""
    mode = summary["mode"]
    if mode == "ladder":
        text = _ladder(steps)
    elif mode == "loader":
        text = loader_answer(summary, trials)
    elif mode == "scaling":
        text = _scaling(summary)
    else:
        text = _recommendation(summary)
    return text if summary["complete"] else f"Cut short, so far: {text}"


def _recommendation(summary: Summary) -> str:
    verdict, tuned, failed = summary["verdict"], summary["tuned"], summary["failed"]
    bound = f"Bound by: {verdict['bound']}. " if verdict else ""
    if failed:
        why = f": {failed['note'].rstrip('.')}" if failed["status"] == "error" else ""
        return (
            f"Nothing to recommend: trial {failed['trial_id']} {failed['status']}{why}."
        )
    if not tuned:
        return (
            f"{bound}Nothing is recommended: no settings leave "
            "benchmark.memory_headroom free."
        )
    source = tuned["provenance"]
    rate, before = source["samples_per_s"], source["samples_per_s_before"]
    if not tuned["gained"]:
        return (
            f"{bound}Nothing measured is faster than the configured settings, "
            f"{number_text(before)} samples/s{interval_text(source)}."
        )
    instead = (
        f" instead of {number_text(before)} ({rate / before:.2f}x)" if before else ""
    )
    return (
        f"{bound}Tuned settings are in conf/tuned: {number_text(rate)} samples/s"
        f"{interval_text(source)}{instead}{_batch(summary)}. Train with them: kedro "
        "run --env=tuned, with the same --params."
    )


def _batch(summary: Summary) -> str:
    if not summary["tuned"]["changes_optimisation"]:
        return ""
    to = summary["tuned"]["parameters"]["train"]["global_batch_size"]
    return (
        f", with global batch {to} in place of {summary['global_batch_size']}, which "
        "changes the optimisation"
    )


def _ladder(steps: pd.DataFrame) -> str:
    rungs = [r for r in steps.to_dict("records") if r["kept"] and r["status"] == "ok"]
    if not rungs:
        return "No rung of the ladder was measured to its end."
    gains = [row for row in rungs if _is_rate(row["individual"])]
    top = max(gains, key=lambda row: float(row["individual"]), default=None)
    largest = (
        f"; the largest step is {top['name']} ({top['individual']:.2f}x)" if top else ""
    )
    rate, times = rungs[-1]["samples_per_s"], rungs[-1]["cumulative"]
    return (
        f"All kept optimisations together give {number_text(times)} times conf/slow, "
        f"{number_text(rate)} samples/s{largest}."
    )


def _scaling(summary: Summary) -> str:
    ok = [row for row in summary["scaling"] if _is_rate(row["share_of_linear"])]
    if not ok:
        return "No number of devices was measured to its end."
    most = max(ok, key=lambda row: int(row["devices"]))
    devices, rate = int(most["devices"]), number_text(most["samples_per_s"])
    share = f"{100 * most['share_of_linear']:.0f} % of {devices} times one alone"
    # Without GPUs the mode starts more processes than devices.
    shared = ", on the same cores" if devices > summary["devices"] else ""
    return f"{rate} samples/s on {counted(devices, 'device')}, {share}{shared}."


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
