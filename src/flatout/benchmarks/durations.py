"""The section of the report that says how long a training takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.benchmarks.markdown import counted, table, time_text


def time_to_train_text(summary: Mapping[str, Any]) -> str:
    """Hours before and after, against the deadline."""
    times = summary["time_to_train"]
    if not times:
        return ""
    epochs, deadline = times[0]["epochs"], times[0]["deadline_hours"]
    lines = [
        (
            f"{entry['rows']:,}",
            time_text(entry["hours_before"]),
            time_text(entry["hours_after"]),
            "yes" if entry["in_time"] else "no",
        )
        for entry in times
    ]
    return (
        f"## Time to train {counted(epochs, 'epoch')}\n\n"
        + table(("rows", "before", "after", f"within {deadline:g} h"), lines)
        + "\n\nSteps alone; evaluation, checkpoints and start-up come on top."
        + _ends_sooner(summary)
    )


def _ends_sooner(summary: Mapping[str, Any]) -> str:
    """What train.max_steps leaves of the data's own epochs."""
    steps, times = summary["max_steps"], summary["time_to_train"][0]
    whole = times["rows"] * times["epochs"]
    samples = (steps or 0) * summary["global_batch_size"]
    if not steps or samples >= whole:
        return ""
    share = samples / whole
    before, after = (
        time_text(share * hours if hours else None)
        for hours in (times["hours_before"], times["hours_after"])
    )
    return (
        f" train.max_steps={steps} ends this training after {samples:,} of "
        f"{whole:,.0f} samples: {before} before, {after} after."
    )
