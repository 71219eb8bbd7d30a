"""What MLflow gets of a point and of a trial, in lots that it takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from flatout.engine.train.recording.metrics_file import parse_point

TESTED = "test_"
MAX_BATCH_METRICS = 1000

Item = TypeVar("Item")


def send_trial(
    client: MlflowClient,
    experiment_id: str,
    trial: dict[str, Any],
    tags: dict[str, Any],
) -> None:
    now = int(time.time() * 1000)  # a record of an earlier version has no times
    start_ms, end_ms = trial.get("start_ms", now), trial.get("end_ms", now)
    tags = {**tags, **trial.get("tags", {})}
    run = client.create_run(
        experiment_id, start_time=start_ms, run_name=trial["name"], tags=tags
    )
    curves = list(_curves(trial.get("points")))
    step = max((metric.step for metric in curves), default=0)
    for lot in in_lots(curves, MAX_BATCH_METRICS):
        client.log_batch(run.info.run_id, metrics=lot)
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(k, v, end_ms, step) for k, v in trial["metrics"].items()],
        params=[Param(k, str(v)) for k, v in trial["params"].items()],
    )
    client.set_terminated(run.info.run_id, trial["status"], end_ms)


def _curves(points: str | None) -> Iterator[Metric]:
    """Of the trial's own training; its final figures come behind them."""
    if points is None or not Path(points).is_file():
        return
    with Path(points).open("rb") as file:
        for line in file:
            yield from metrics_of(parse_point(line))


def in_lots(items: Iterable[Item], size: int) -> list[list[Item]]:
    rows = list(items)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def metrics_of(point: dict[str, Any]) -> list[Metric]:
    """Of a point as the engine writes it; none of a damaged line, which is empty, and
    none of the test split, which is judged once."""
    time_ms = int(point.get("time_s", time.time()) * 1000)
    return [
        Metric(name, float(value), time_ms, int(point["step"]))
        for name, value in point.get("metrics", {}).items()
        if isinstance(value, (int, float)) and not name.startswith(TESTED)
    ]
