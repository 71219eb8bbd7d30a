"""Figures for Kedro-Viz, MLflow and documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from flatout.engine.rows.rows import rows_from_dataset

MOST_SHOWN = 40
COLUMNS = 8
MAX_NAME_LENGTH = 16


def image_sheet(wrong: pd.DataFrame, rows: Any) -> Any:
    """Return a figure of the first images in `wrong`, a table with the columns row,
    label, prediction and score. `rows` is the `datasets.Dataset` that contains the
    images. pyplot is not used, because its state is global."""
    from matplotlib.figure import Figure

    shown = wrong.head(MOST_SHOWN)
    lines = max(1, -(-len(shown) // COLUMNS))
    figure = Figure(figsize=(1.6 * COLUMNS, 2 * lines + 0.5), layout="constrained")
    every = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
    pixels = rows_from_dataset(rows).views(shown["row"].to_numpy(np.int64))
    for axis in every:
        axis.set_axis_off()
    for axis, image, row in zip(every, pixels, shown.itertuples(), strict=False):
        axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
        axis.set_title(_caption(row), fontsize=7, parse_math=False)
    figure.suptitle(f"{len(wrong)} wrong of the largest loss; true > predicted")
    return figure


def _caption(row: Any) -> str:
    names = (str(name)[:MAX_NAME_LENGTH] for name in (row.label, row.prediction))
    return f"{' > '.join(names)} ({100 * row.score:.0f} %)\nrow {row.row}"


def reliability_figure(report: dict[str, Any]) -> Any:
    """Return a Plotly reliability diagram for an evaluation report, with one point per
    bin, before and after temperature scaling. If rows have no probabilities, only the
    diagonal is drawn."""
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], name="calibrated", line_dash="dot")
    for name, bins in report.get("reliability", {}).items():
        counts, shares, true = zip(*bins, strict=True) if bins else ((), (), ())
        texts = [f"{count:,} predictions" for count in counts]
        figure.add_scatter(x=shares, y=true, text=texts, name=name)
    figure.update_layout(
        xaxis={"title": "probability of a prediction", "range": [0, 1]},
        yaxis={"title": "share that is true", "range": [0, 1]},
    )
    return figure


def length_figure(report: dict[str, Any]) -> Any:
    """Return a Plotly histogram of the training rows' lengths, from a token report."""
    edges, train = report["histogram"]["edges"], report["splits"]["train"]
    cut, length = train["cut_share"], train["length"]
    title = f"{train['rows']:,} training rows: median {length['median']:g}, "
    title += f"mean {length['mean']:g} tokens"
    title += "" if cut is None else f", {100 * cut:.1f} % of them cut"
    counts, width = report["histogram"]["counts"], edges[1] - edges[0]
    figure = go.Figure(go.Bar(x=edges[:-1], y=counts, width=width, offset=0))
    axes = {"xaxis_title": "tokens of a row", "yaxis_title": "rows"}
    return figure.update_layout(title=title, **axes)
