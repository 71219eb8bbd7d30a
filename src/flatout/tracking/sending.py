"""From the outbox to MLflow: in lots, in order, and nothing twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    Metric,
    Param,
    Run,
    RunTag,
)

from flatout.engine.train.recording.metrics_file import parse_point
from flatout.tracking.lots import MAX_BATCH_METRICS, in_lots, metrics_of, send_trial
from flatout.tracking.outbox import ARTIFACTS, Outbox, RunRecord
from flatout.tracking.outcomes import DESCRIPTION, report_tags
from flatout.tracking.pages.description import description
from flatout.tracking.pages.experiment import describe
from flatout.tracking.pages.figures import figure_tags
from flatout.tracking.pages.pictures import draw
from flatout.tracking.store import find_run, process_tags

MAX_BATCH_PARAMS = 100
MAX_VALUE_LENGTH = 5000
MAX_RUNS = 50_000


class Sender:
    """Sends what is new of one run. What the store has of it is asked once; what it
    raises is the store's."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._run: Run | None = None
        self.read_bytes = 0
        """Of the points' file, so far."""
        self._first_line = b""
        """Of the points' file: its time tells a file from the one that it replaced."""
        self.pictures_s = 0.0

    @property
    def _record(self) -> RunRecord:
        return self._outbox.record

    def send(self, client: MlflowClient) -> str:
        """Send what is new; returns the run's id."""
        run_id = self._open(client)
        self._send_datasets(client, run_id)
        for metrics in self._lots():
            client.log_batch(run_id, metrics=metrics)
            self._outbox.note_sent(metrics)
        self._send_params_and_tags(client, run_id)  # points may have brought tags
        return run_id

    def end(self, client: MlflowClient) -> None:
        """Send all that is left of a run that has ended, and end it in MLflow too."""
        record, run_id = self._record, self.send(client)
        now = record.end_ms or int(time.time() * 1000)
        step = max(record.sent_steps.values(), default=0)
        finals = [Metric(k, v, now, step) for k, v in record.metrics.items()]
        for lot in in_lots(finals, MAX_BATCH_METRICS):
            client.log_batch(run_id, metrics=lot)
        self._send_trials(client, run_id)
        folder, started_s = self._outbox.points.parent, record.start_ms / 1000
        begin_s = time.perf_counter()
        pictures = draw(folder, started_s)
        self.pictures_s = time.perf_counter() - begin_s
        files = [*artifacts(self._outbox), *pictures]
        for path in files:
            client.log_artifact(run_id, str(path))
        page = f"#/experiments/{self._experiment_id}/runs/{run_id}"
        text = description(record, page, [path.name for path in files])
        client.set_tag(run_id, DESCRIPTION, text[:MAX_VALUE_LENGTH])
        client.set_terminated(run_id, record.status, record.end_ms)
        record.complete = True
        record.delivered.append(record.tracking_uri)
        self._outbox.save()

    def _open(self, client: MlflowClient) -> str:
        """Id of the run in the store: made there, or RUNNING again where it goes on."""
        if self._run is not None:
            return str(self._run.info.run_id)
        run, record = find_run(client, self._record.run_id), self._record
        if run is None:
            self._outbox.readdress(record.tracking_uri, record.artifact_location)
            run = _create_run(record, client)
            record.run_id = run.info.run_id
            self._outbox.save()
        self._experiment_id = run.info.experiment_id
        self._params = {*run.data.params}
        self._tags = dict(run.data.tags)
        self._datasets = {known.dataset.name for known in run.inputs.dataset_inputs}
        # First the tags: a RUNNING run of a process that is gone would be closed.
        self._send_params_and_tags(client, run.info.run_id)
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, "RUNNING")
        self._run = run
        return str(run.info.run_id)

    def _send_params_and_tags(self, client: MlflowClient, run_id: str) -> None:
        """A run that goes on may have another value of a parameter now, which MLflow
        would not take: it keeps the first."""
        record = self._record
        params = {
            name: Param(name, text[:MAX_VALUE_LENGTH])
            for name, text in list(record.params.items())
            if name not in self._params
        }
        figures = figure_tags(dict(record.figures))  # others add to it meanwhile
        wanted = {**record.settled, **record.tags, **figures}
        tags = {
            name: text[:MAX_VALUE_LENGTH]
            for name, text in wanted.items()
            if self._tags.get(name) != text[:MAX_VALUE_LENGTH]
        }
        for lot in in_lots(params.values(), MAX_BATCH_PARAMS):
            client.log_batch(run_id, params=lot)
        if tags:
            client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
        self._params |= params.keys()
        self._tags |= tags

    def _send_datasets(self, client: MlflowClient, run_id: str) -> None:
        new = [d for d in self._record.datasets if d["name"] not in self._datasets]
        if new:
            client.log_inputs(run_id, datasets=[_dataset_input(facts) for facts in new])
            self._datasets |= {facts["name"] for facts in new}

    def _send_trials(self, client: MlflowClient, run_id: str) -> None:
        """As nested runs, those that the store does not have whole."""
        if not self._record.trials:
            return
        nested = client.search_runs(
            [self._experiment_id],
            f"tags.mlflow.parentRunId = '{run_id}'",
            max_results=MAX_RUNS,
        )
        ended = ("FINISHED", "FAILED")
        whole = {r.info.run_name for r in nested if r.info.status in ended}
        # By the process's own a trial is closed that a kill leaves open.
        tags = {"mlflow.parentRunId": run_id, **process_tags()}
        for trial in self._record.trials:
            if trial["name"] not in whole:
                send_trial(client, self._experiment_id, trial, tags)

    def _lots(self) -> Iterator[list[Metric]]:
        """New metrics in lots that MLflow takes; one is sent when the next is asked
        for. A training that goes on, or starts again, repeats steps: what the store has
        of a metric is passed over."""
        seen, end = dict(self._record.sent_steps), self.read_bytes
        lot: list[Metric] = []
        for end_of_line, point in self._new_points():
            self._record.settled.update(report_tags(point.get("settled", {})))
            found = [m for m in metrics_of(point) if m.step > seen.get(m.key, -1)]
            if lot and len(lot) + len(found) > MAX_BATCH_METRICS:
                yield lot
                self.read_bytes, lot = end, []
            lot += found
            seen |= {metric.key: metric.step for metric in found}
            end = end_of_line
        if lot:
            yield lot
        self.read_bytes = end

    def _new_points(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole lines not read yet, each with the file's length up to its end."""
        if not self._outbox.points.is_file():
            return
        with self._outbox.points.open("rb") as file:
            first = file.readline()
            if first != self._first_line:  # a training that starts again empties it
                self._first_line, self.read_bytes = first, 0
            file.seek(self.read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield file.tell(), parse_point(line)


def _create_run(record: RunRecord, client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name(record.experiment)
    if experiment is None:
        place = record.artifact_location
        created = client.create_experiment(record.experiment, place)
        experiment = client.get_experiment(created)
    describe(client, experiment)
    return client.create_run(
        experiment.experiment_id, start_time=record.start_ms, run_name=record.name
    )


def _dataset_input(facts: dict[str, str]) -> DatasetInput:
    dataset = Dataset(
        name=facts["name"],
        digest=facts["digest"],
        source_type="local",
        source=json.dumps({"uri": facts["source"]}),
        profile=json.dumps({"num_rows": int(facts["rows"])}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", facts["context"])])


def artifacts(outbox: Outbox) -> list[Path]:
    """Files of the run beside its points; none that an earlier run left."""
    folder, started_s = outbox.points.parent, outbox.record.start_ms / 1000
    named = [folder / name for name in (*ARTIFACTS, "environment.json")]
    return [p for p in named if p.is_file() and p.stat().st_mtime >= started_s]
