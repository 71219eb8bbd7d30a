"""Picture of the detections with other numbers of likeliest keys."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

NAMES = ("precision", "recall", "f1")


def by_top_keys(report: dict[str, Any]) -> Any:
    """Return a Plotly figure: precision, recall and F1 by `detect.top_keys`."""
    lines = report["by_top_keys"]
    places = [line["top_keys"] for line in lines]
    figure = go.Figure(
        [go.Scatter(x=places, y=[line[n] for line in lines], name=n) for n in NAMES]
    )
    figure.add_vline(report["top_keys"], line_dash="dot")
    figure.update_layout(xaxis_title="detect.top_keys", yaxis_range=[0, 1.02])
    return figure
