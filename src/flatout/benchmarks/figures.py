"""Plotly figures of a benchmark, as Kedro-Viz shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flatout.engine.bench.verdict import MEMORY_BEST_PCT

PHASES = (
    ("io_ms", "I/O", "#b07aa1"),
    ("forward_ms", "forward", "#4e79a7"),
    ("backward_ms", "backward", "#f28e2b"),
    ("optimizer_ms", "optimizer", "#59a14f"),
)
KEPT_COLOR, LOST_COLOR = "#4e79a7", "#bab0ac"


def measured(trials: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole trainings that ended well."""
    if trials.empty:
        return trials
    whole = trials["kind"].isin(["end_to_end", "compute"])
    return trials[whole & (trials["status"] == "ok")]


def throughput(trials: pd.DataFrame) -> go.Figure:
    """Samples/s over the global batch, a line a strategy and loader."""
    rows = measured(trials)
    rows = rows[rows["kind"] == "end_to_end"] if len(rows) else rows
    figure = _figure("Throughput", "global batch, samples", "samples/s")
    if rows.empty:
        return _empty(figure, "no training was measured")
    names = ["strategy", "precision", "token_budget", "num_workers", "world_size"]
    for values, group in rows.groupby(names, dropna=False):
        line = group.sort_values("global_batch_size")
        strategy, precision, budget, workers, devices = values
        label = f"{strategy}/{budget}, {precision}, {workers} workers"
        figure.add_scatter(
            x=line["global_batch_size"],
            y=line["samples_per_s"],
            mode=_joined_by(line),
            hovertext=_names(line),
            name=label if devices == 1 else f"{label}, {devices} devices",
            error_y={"array": _half_spread(line), "visible": True},
        )
    figure.update_xaxes(type="log", tickvals=sorted(rows["global_batch_size"].unique()))
    return figure


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


def phases(trials: pd.DataFrame) -> go.Figure:
    """Where a step's time goes, a bar a trial."""
    rows = measured(trials)
    figure = _figure("Phases of a step", "trial", "milliseconds")
    if rows.empty:
        return _empty(figure, "no training was measured")
    for column, name, color in PHASES:
        figure.add_bar(x=_names(rows), y=rows[column], name=name, marker_color=color)
    figure.add_scatter(
        x=_names(rows),
        y=rows["total_ms"],
        mode="markers",
        name="whole step, without phase timing",
        marker={"symbol": "line-ew-open", "size": 16, "color": "black"},
    )
    figure.update_layout(barmode="stack")
    return figure


def memory(
    trials: pd.DataFrame, memory_gib: float | None, headroom: float
) -> go.Figure:
    """Memory of each trial under the device's own, and guide E's best range."""
    figure = _figure("Memory", "trial", "GiB reserved")
    known = trials.dropna(subset=["reserved_memory_gib"]) if len(trials) else trials
    if known.empty:
        return _empty(figure, "no memory was measured")
    figure.add_bar(x=_names(known), y=known["reserved_memory_gib"], name="reserved")
    if memory_gib:
        low, high = (memory_gib * percent / 100 for percent in MEMORY_BEST_PCT)
        figure.add_hrect(
            y0=low,
            y1=high,
            fillcolor="green",
            opacity=0.1,
            line_width=0,
            annotation_text="60-80 %: guide E's best",
        )
        figure.add_hline(
            y=(1 - headroom) * memory_gib,
            line_dash="dash",
            annotation_text=f"{100 * headroom:.0f} % of head-room",
        )
    return figure


def ladder(steps: pd.DataFrame) -> go.Figure:
    """The waterfall: each rung's samples/s, with both speed-ups written beside it."""
    figure = _figure(
        "From the slow configuration, one change at a time", "", "samples/s"
    )
    if steps.empty:
        return _empty(
            figure, "kedro run --pipelines=benchmark --params=benchmark.mode=ladder"
        )
    rows = steps.dropna(subset=["samples_per_s"])
    below = _kept_below(rows)
    figure.add_bar(
        x=rows["name"],
        y=rows["samples_per_s"] - below,
        base=below,
        marker_color=[KEPT_COLOR if kept else LOST_COLOR for kept in rows["kept"]],
        text=[
            f"x{one:.2f}<br>x{all_:.1f} in all"
            for one, all_ in zip(rows["individual"], rows["cumulative"], strict=True)
        ],
        hovertext=[
            f"guide {s}: {c}"
            for s, c in zip(rows["source"], rows["claim"], strict=True)
        ],
        name="samples/s",
    )
    return figure


def _kept_below(rows: pd.DataFrame) -> list[float]:
    """For each rung the rate of those kept below it."""
    below, bases = 0.0, []
    for rate, kept in zip(rows["samples_per_s"], rows["kept"], strict=True):
        bases.append(below)
        below = rate if kept else below
    return bases


def _names(rows: pd.DataFrame) -> list[str]:
    """`003 TF32` above `packed/8192 b32 w0`, as the axis shows a trial; `d2` behind it
    where the number of devices differs."""
    several = rows["world_size"].nunique() > 1
    return [_name(row, several) for row in rows.itertuples()]


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


def all_figures(
    trials: pd.DataFrame, summary: Mapping[str, Any], steps: pd.DataFrame
) -> dict[str, go.Figure]:
    return {
        "throughput": throughput(trials),
        "phases": phases(trials),
        "memory": memory(trials, summary["memory_gib"], summary["memory_headroom"]),
        "ladder": ladder(steps),
    }
