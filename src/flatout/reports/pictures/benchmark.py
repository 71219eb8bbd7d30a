"""Plotly figures of a benchmark, as Kedro-Viz shows them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

KEPT_COLOR, LOST_COLOR = "#4e79a7", "#bab0ac"


def throughput(trials: pd.DataFrame) -> go.Figure:
    """Samples/s over the global batch, a line a strategy and loader."""
    rows = trials
    if len(rows):
        rows = rows[(rows["kind"] == "end_to_end") & (rows["status"] == "ok")]
    figure = _figure("Throughput", "global batch, samples", "samples/s")
    if rows.empty:
        return _empty(figure, "no training was measured")
    for name, group in rows.groupby(_line_names(rows)):
        line = group.sort_values("global_batch_size")
        figure.add_scatter(
            x=line["global_batch_size"],
            y=line["samples_per_s"],
            mode=_joined_by(line),
            hovertext=_names(line),
            name=name,
            error_y={"array": _half_spread(line), "visible": True},
        )
    figure.update_xaxes(type="log", tickvals=sorted(rows["global_batch_size"].unique()))
    return figure


def _line_names(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([_settings_name(row) for row in rows.itertuples()], rows.index)


def _settings_name(row: Any) -> str:
    name = f"{row.strategy}/{row.token_budget}, {row.precision}"
    devices = "" if row.world_size == 1 else f", {row.world_size} devices"
    return f"{name}, {row.num_workers} workers{devices}"


def _joined_by(rows: pd.DataFrame) -> str:
    """A line goes from batch to batch. Rungs of the ladder, and trials at one batch,
    differ in something else."""
    unrelated = (rows["mode"] == "ladder").any()
    if unrelated or not rows["global_batch_size"].is_unique:
        return "markers"
    return "lines+markers"


def _half_spread(rows: pd.DataFrame) -> Any:
    share = rows["samples_per_s_spread_pct"].fillna(0) / 200
    return rows["samples_per_s"] * share


def ladder(steps: pd.DataFrame) -> go.Figure:
    """The waterfall: each rung's gain on top of those kept below it. Gains, not rates:
    a rung is measured beside the one below, and another minute has another speed."""
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
    """Why there is no waterfall; empty where there is one."""
    if steps.empty:
        return "kedro run --pipelines=benchmark --params=benchmark.mode=ladder"
    slow = steps.iloc[0]
    if pd.isna(slow["cumulative"]):
        return f"{slow['name']} ended as {slow['status']}: no rung can be compared"
    return ""


def _levels(steps: pd.DataFrame) -> list[float]:
    """What the rungs kept below each make together; the last lines, which stand beside
    conf/slow, begin at nothing."""
    level, levels = 0.0, []
    for row in steps.itertuples():
        levels.append(0.0 if _is_end(row) else level)
        if row.kept and not pd.isna(row.cumulative):
            level = row.cumulative
    return levels


def _is_end(row: Any) -> bool:
    """Whether all that was kept was measured beside conf/slow."""
    return bool(pd.isna(row.individual) and not pd.isna(row.cumulative))


def _gain(row: Any) -> str:
    """The label of a rung's bar."""
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


def _names(rows: pd.DataFrame) -> pd.Series:
    """`003 TF32` above `packed/8192 b32 w0`, as the axis shows a trial; `d2` behind it
    where the number of devices differs."""
    several = rows["world_size"].nunique() > 1
    names = [_name(row, several) for row in rows.itertuples()]
    return pd.Series(names, rows.index)


def _name(row: Any, several: bool) -> str:
    # A table read from a file has no number where a label is empty.
    label = "" if pd.isna(row.label) else f" {row.label}"
    settings = f"{row.strategy}/{row.token_budget} b{row.global_batch_size}"
    devices = f" d{row.world_size}" if several else ""
    return f"{row.trial_id}{label}<br>{settings} w{row.num_workers}{devices}"


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="plotly_white"
    )
    return figure


def _empty(figure: go.Figure, text: str) -> go.Figure:
    figure.add_annotation(text=text, showarrow=False, xref="paper", yref="paper")
    return figure
