"""Optuna's figures of a sweep, from its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

Row = Mapping[str, Any]


def sweep_figures(rows: Sequence[Row], metric: str, higher: bool) -> dict[str, Any]:
    """Return `parallel`, `importance` and `history` from rows of sweep_trials.csv."""
    from optuna.visualization import (
        plot_optimization_history,
        plot_parallel_coordinate,
        plot_param_importances,
    )

    study, name = _study(rows, metric, higher), {"target_name": metric}
    drawn: dict[str, Callable[[], Any]] = {
        "parallel": lambda: plot_parallel_coordinate(study, **name),
        "importance": lambda: plot_param_importances(study, **name),
        "history": lambda: plot_optimization_history(study, **name),
    }
    return {kind: _drawn(draw) for kind, draw in drawn.items()}


def _study(rows: Sequence[Row], metric: str, higher: bool) -> Any:
    """Return a study in memory with the trials that have a value."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if higher else "minimize")
    rated = [r for r in rows if r["status"] == "ok" and _is_number(r[metric])]
    swept = [name for name in (rated[0] if rated else {}) if "." in name]
    axes = {name: _axis([row[name] for row in rated]) for name in swept}
    for row in rated:
        study.add_trial(
            optuna.create_trial(
                params={name: row[name] for name in swept},
                distributions=axes,
                value=float(row[metric]),
            )
        )
    return study


def _axis(values: Sequence[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = [v for v in values if isinstance(v, float)]
    if len(numbers) == len(values) and min(numbers) < max(numbers):
        return FloatDistribution(min(numbers), max(numbers))
    return CategoricalDistribution(list(dict.fromkeys(values)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value  # noqa: PLR0124


def _drawn(draw: Callable[[], Any]) -> Any:
    """Return the figure; with too few trials for optuna, a figure with its message."""
    try:
        figure = draw()
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        figure = go.Figure().update_layout(title=f"Nothing to draw: {error}")
    # Convert its types (tuples, numpy) to plain JSON for the catalog.
    return go.Figure(json.loads(figure.to_json()))
