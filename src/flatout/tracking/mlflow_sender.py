"""Send the data in a run's folder to MLflow in batches, in order and only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, Param, Run, RunTag

from flatout.tracking.models import log_and_register
from flatout.tracking.outcomes import DESCRIPTION, description, figure_tags
from flatout.tracking.points import (
    MAX_BATCH_METRICS,
    Tail,
    batched,
    mlflow_metrics,
    send_trials,
)
from flatout.tracking.record import RunFolder, RunRecord, Sent
from flatout.tracking.store import connect, find_run

MAX_BATCH_PARAMS = 100
MAX_VALUE_LENGTH = 5000
SYSTEM = "system.jsonl"
"""File in which the tracking program records the system metrics."""


class MlflowSender:
    """Sends the new data of a run to a store. The run's data in the store is read only
    once. All methods may raise the exceptions of the store's client."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.uri = folder.record.tracking_uri
        self.sent = Sent.load(folder.path, self.uri)
        self._run: Run | None = None
        points = folder.record.points
        self._points = Tail(Path(points)) if points else None
        self._system = Tail(folder.path / SYSTEM)

    @property
    def _record(self) -> RunRecord:
        return self.folder.record

    def client(self) -> MlflowClient:
        return connect(self.uri)

    def send(self, client: MlflowClient) -> str | None:
        """Send new data and return the run's id. Nothing is sent, and the result is
        None, before the first node begins or, if the run trains, before the first point
        is logged. Until then, the run may turn out to have nothing to record."""
        if self._has_not_begun():
            return None
        run_id = self._open(client)
        for tail in filter(None, (self._points, self._system)):
            for metrics in self._metric_batches(tail):
                client.log_batch(run_id, metrics=metrics)
                self.sent.steps |= {metric.key: metric.step for metric in metrics}
                self.sent.fault = None  # the run waits longer if the store responds
                self.save()
        self._send_params_and_tags(client, run_id)
        if self._record.model and not self.sent.model:
            self.sent.model = log_and_register(client, self._record.model, run_id)
            self.save()
        return run_id

    def end(self, client: MlflowClient, status: str, end_ms: int) -> str:
        """Send all remaining data of a run that has ended, end the run in MLflow, and
        return its id."""
        record, run_id = self._record, self.send(client)
        run_id = run_id or self._open(client)
        finals = {k: v for k, v in record.metrics.items() if k not in self.sent.steps}
        step = max(self.sent.steps.values(), default=0)
        last = [Metric(name, value, end_ms, step) for name, value in finals.items()]
        client.log_batch(run_id, last)
        send_trials(client, self._experiment_id, run_id, record.trials)
        for path in self.folder.artifacts():
            client.log_artifact(run_id, str(path))
        text = description(record.tags.get(DESCRIPTION, ""), record)
        client.set_tag(run_id, DESCRIPTION, text[:MAX_VALUE_LENGTH])
        client.set_terminated(run_id, status, end_ms)
        self.sent.ended, self.sent.fault = [status, end_ms], None
        self.save()
        return run_id

    def save(self) -> None:
        self.sent.save(self.folder.path)

    def _has_not_begun(self) -> bool:
        if self._record.end_ms is not None or self.sent.run_id:
            return False
        if self._points is None:
            return not self._record.params
        return not any(self._is_of_run(point) for _, point in self._points.new())

    def _is_of_run(self, point: dict[str, object]) -> bool:
        """Return whether the point was recorded by this run, not by an earlier one."""
        time_s = point.get("time_s")
        is_known = isinstance(time_s, (int, float))
        return is_known and 1000 * time_s >= self._record.start_ms

    def _open(self, client: MlflowClient) -> str:
        """Return the run's id in the store, after creating the run or setting it to
        RUNNING."""
        if self._run is not None:
            return str(self._run.info.run_id)
        run = find_run(client, self.sent.run_id)
        if run is None:
            run = client.create_run(
                _experiment(self._record, client).experiment_id,
                start_time=self._record.start_ms,
                run_name=self._record.name,
            )
            self.sent = Sent(self.uri, run.info.run_id)
        self.sent.run_id, self.sent.ended = run.info.run_id, None
        self.save()
        self._experiment_id = run.info.experiment_id
        self._params = {*run.data.params}
        self._tags = dict(run.data.tags)
        # Tags are sent first, because they identify the process of a RUNNING run.
        self._send_params_and_tags(client, run.info.run_id)
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, "RUNNING")
        self._run = run
        return str(run.info.run_id)

    def _send_params_and_tags(self, client: MlflowClient, run_id: str) -> None:
        """Send the parameters and tags that the store does not have. If a resumed run
        changes a parameter, the first value is kept, because MLflow would reject the
        new value."""
        record = self._record
        wanted = {**record.tags, **figure_tags(record.figures)}
        texts = {name: text[:MAX_VALUE_LENGTH] for name, text in wanted.items()}
        tags = dict(texts.items() - self._tags.items())
        params = [
            Param(name, text[:MAX_VALUE_LENGTH])
            for name, text in record.params.items()
            if name not in self._params
        ]
        for batch in batched(params, MAX_BATCH_PARAMS):
            client.log_batch(run_id, params=batch)
        if tags:
            client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
        self._params |= {param.key for param in params}
        self._tags |= tags

    def _metric_batches(self, tail: Tail) -> Iterator[list[Metric]]:
        """Yield batches of the new metrics in `tail`. The caller must send a batch
        before it requests the next one. Metrics that the store already has are skipped,
        because a resumed run repeats steps."""
        seen, end = dict(self.sent.steps), tail.read_bytes
        batch: list[Metric] = []
        for end_of_line, point in tail.new():
            if self._is_of_run(point):
                found = [
                    m for m in mlflow_metrics(point) if m.step > seen.get(m.key, -1)
                ]
                if batch and len(batch) + len(found) > MAX_BATCH_METRICS:
                    yield batch
                    tail.read_bytes, batch = end, []
                batch += found
                seen |= {metric.key: metric.step for metric in found}
            end = end_of_line
        if batch:
            yield batch
        tail.read_bytes = end


def _experiment(record: RunRecord, client: MlflowClient) -> Experiment:
    """Return the record's experiment, creating or restoring it if necessary."""
    found = client.get_experiment_by_name(record.experiment)
    if found is None:
        made = client.create_experiment(record.experiment, record.artifact_location)
        return client.get_experiment(made)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found
