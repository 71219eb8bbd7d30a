"""Picture of how often predictions come true, by their probability."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go


def reliability_figure(report: dict[str, Any]) -> Any:
    """Return a Plotly figure of an evaluation report: a point per bin of probabilities,
    before and after the temperature. Without lines if rows have no probabilities."""
    figure = go.Figure(
        go.Scatter(x=[0, 1], y=[0, 1], name="calibrated", line_dash="dot")
    )
    for name, bins in report.get("reliability", {}).items():
        counts, shares, true = zip(*bins, strict=True) if bins else ((), (), ())
        texts = [f"{count:,} predictions" for count in counts]
        figure.add_scatter(x=shares, y=true, text=texts, name=name)
    figure.update_layout(
        xaxis={"title": "probability of a prediction", "range": [0, 1]},
        yaxis={"title": "share that is true", "range": [0, 1]},
    )
    return figure
