"""The waterfall of a ladder, a Plotly figure for Kedro-Viz."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

KEPT_COLOR, LOST_COLOR = "#4e79a7", "#bab0ac"


def ladder(steps: pd.DataFrame) -> go.Figure:
    """Plot the waterfall: each rung's gain over those kept below it. Gains, not rates:
    a rung is measured with the one below, and the speed changes over time."""
    title, axis = "From the slow configuration, one change at a time", "times conf/slow"
    figure = _figure(title, "", axis)
    missing = _missing(steps)
    if missing:
        return _empty(figure, missing)
    steps = steps.fillna({"source": ""})
    levels = _levels(steps)
    figure.add_bar(
        x=steps["name"],
        y=(steps["cumulative"] - levels).fillna(0.0),
        base=levels,
        marker_color=[KEPT_COLOR if kept else LOST_COLOR for kept in steps["kept"]],
        text=[_gain(row) for row in steps.itertuples()],
        hovertext=[_rung(row) for row in steps.itertuples()],
        name="times conf/slow; grey: left out",
    )
    return figure


def _missing(steps: pd.DataFrame) -> str:
    """Return why there is no waterfall; empty if there is one."""
    if steps.empty:
        return "kedro run --pipelines=benchmark --params=benchmark.mode=ladder"
    slow = steps.iloc[0]
    if pd.isna(slow["cumulative"]):
        return f"{slow['name']} ended as {slow['status']}: no rung can be compared"
    return ""


def _levels(steps: pd.DataFrame) -> list[float]:
    """Return the total gain of the rungs kept below each; the last lines, which are
    compared with conf/slow, begin at 0."""
    level, levels = 0.0, []
    for row in steps.itertuples():
        levels.append(0.0 if _is_end(row) else level)
        if row.kept and not pd.isna(row.cumulative):
            level = row.cumulative
    return levels


def _is_end(row: Any) -> bool:
    """Return True if a line compares all kept changes with conf/slow."""
    return bool(pd.isna(row.individual) and not pd.isna(row.cumulative))


def _gain(row: Any) -> str:
    """Return the label of a rung's bar."""
    if _is_end(row):
        return f"x{row.cumulative:.1f}<br>side by side"
    gain = row.status if pd.isna(row.individual) else f"x{row.individual:.2f}"
    if row.kept and not pd.isna(row.cumulative):
        return f"{gain}<br>x{row.cumulative:.1f} in all"
    return f"{gain}<br>left out"


def _rung(row: Any) -> str:
    rate = "" if pd.isna(row.samples_per_s) else f"{row.samples_per_s:,.1f} samples/s"
    claim = f"guide {row.source}: {row.claim}" if row.source else ""
    return "; ".join(part for part in (rate, claim) if part)


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="plotly_white"
    )
    return figure


def _empty(figure: go.Figure, text: str) -> go.Figure:
    figure.add_annotation(text=text, showarrow=False, xref="paper", yref="paper")
    return figure
