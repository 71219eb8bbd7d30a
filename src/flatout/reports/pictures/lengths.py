"""The picture of the lengths of token rows."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go


def length_figure(report: dict[str, Any]) -> Any:
    """Return a Plotly figure of a token report: training rows by length."""
    edges, train = report["histogram"]["edges"], report["splits"]["train"]
    cut, length = train["cut_share"], train["length"]
    title = f"{train['rows']:,} training rows: median {length['median']:g}, "
    title += f"mean {length['mean']:g} tokens"
    title += "" if cut is None else f", {100 * cut:.1f} % of them cut"
    counts, width = report["histogram"]["counts"], edges[1] - edges[0]
    figure = go.Figure(go.Bar(x=edges[:-1], y=counts, width=width, offset=0))
    axes = {"xaxis_title": "tokens of a row", "yaxis_title": "rows"}
    return figure.update_layout(title=title, **axes)
