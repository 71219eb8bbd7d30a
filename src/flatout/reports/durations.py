"""Section of the report on the duration of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.reports.markdown import Columns, counted, section, table, time_text


def time_to_train_text(summary: Mapping[str, Any]) -> str:
    """Compare the hours before and after with the deadline."""
    times = summary["time_to_train"]
    if not times:
        return ""
    epochs, deadline = times[0]["epochs"], times[0]["deadline_hours"]
    columns: Columns = {
        "rows": lambda row: f"{row['rows']:,}",
        "before": lambda row: time_text(row["hours_before"]),
        "after": lambda row: time_text(row["hours_after"]),
        f"within {deadline:g} h": lambda row: "yes" if row["in_time"] else "no",
    }
    note = "Steps alone; evaluation, checkpoints and start-up come on top."
    title = f"Time to train {counted(epochs, 'epoch')}"
    return section(title, table(times, columns), note)
