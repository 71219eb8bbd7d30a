"""Convert new metric points to MLflow's metrics, and send trials as nested runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from flatout.engine.train.recording.metrics_file import parse_point, read_points

TESTED = "test_"
MAX_BATCH_METRICS = 1000

Item = TypeVar("Item")


class Tail:
    """Reads the complete lines of a growing file, which a new run may replace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0
        """Number of bytes that have been read so far."""
        self._first_line = b""
        """The first line of the file. It contains a time, so that it differs if a new
        run has replaced the file."""

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield a pair (offset, point) for each unread point. The offset is the number
        of bytes in the file up to the end of the point's line."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            first = file.readline()
            if first != self._first_line:
                self._first_line, self.read_bytes = first, 0
            file.seek(self.read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield file.tell(), parse_point(line)


def mlflow_metrics(point: dict[str, Any]) -> list[Metric]:
    """Return the values of a metric point as MLflow's metrics. A corrupted line results
    in an empty list. Test metrics are left out, because the test split is evaluated
    only once."""
    time_ms = int(point.get("time_s", time.time()) * 1000)
    return [
        Metric(name, float(value), time_ms, int(point["step"]))
        for name, value in point.get("metrics", {}).items()
        if isinstance(value, (int, float)) and not name.startswith(TESTED)
    ]


def batched(items: Iterable[Item], size: int) -> list[list[Item]]:
    rows = list(items)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


PARENT = "mlflow.parentRunId"
MAX_RUNS = 50_000


def send_trials(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    trials: list[dict[str, Any]],
) -> None:
    """Send trials as nested runs of the run `run_id`. Trials that are complete in the
    store are skipped."""
    if not trials:
        return
    query = f"tags.{PARENT} = '{run_id}'"
    nested = client.search_runs([experiment_id], query, max_results=MAX_RUNS)
    ended = ("FINISHED", "FAILED")
    whole = {r.info.run_name for r in nested if r.info.status in ended}
    for trial in trials:
        if trial["name"] not in whole:
            _send(client, experiment_id, run_id, trial)


def _send(
    client: MlflowClient, experiment_id: str, parent: str, trial: dict[str, Any]
) -> None:
    now = int(time.time() * 1000)
    start_ms, end_ms = trial.get("start_ms", now), trial.get("end_ms", now)
    tags = {PARENT: parent, **trial.get("tags", {})}
    run = client.create_run(
        experiment_id, start_time=start_ms, run_name=trial["name"], tags=tags
    )
    # The trial's learning curves are sent first, and its final metrics after them.
    points = read_points(Path(trial["points"])) if trial.get("points") else []
    curves = [metric for point in points for metric in mlflow_metrics(point)]
    step = max((metric.step for metric in curves), default=0)
    for batch in batched(curves, MAX_BATCH_METRICS):
        client.log_batch(run.info.run_id, metrics=batch)
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(k, v, end_ms, step) for k, v in trial["metrics"].items()],
        params=[Param(k, str(v)) for k, v in trial["params"].items()],
    )
    client.set_terminated(run.info.run_id, trial["status"], end_ms)
