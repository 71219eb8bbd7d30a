"""From the outbox to MLflow: in lots, in order, and nothing twice."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from flatout.tracking.outbox import ARTIFACTS, Outbox, RunRecord, metrics_of
from flatout.tracking.outcomes import report_tags
from flatout.tracking.pictures import draw
from flatout.tracking.store import knows_run, process_tags

logger = logging.getLogger(__name__)

MAX_BATCH_METRICS = 1000
MAX_BATCH_PARAMS = 100
MAX_VALUE_LENGTH = 5000


def send(outbox: Outbox, client: MlflowClient) -> str:
    """Send what is new; returns the run's id. What it raises is the store's."""
    run_id = _opened(outbox, client)
    _send_datasets(outbox, client, run_id)
    for metrics, end in _lots(outbox):
        client.log_batch(run_id, metrics=metrics)
        outbox.note_sent(metrics, end)
    _send_params_and_tags(outbox, client, run_id)  # points may have brought tags
    return run_id


def _opened(outbox: Outbox, client: MlflowClient) -> str:
    """Id of the run in the store: made there, or set to RUNNING where it goes on."""
    record = outbox.record
    if record.goes_on and record.run_id and not knows_run(client, record.run_id):
        outbox.readdress(record.tracking_uri, record.artifact_location)
    if record.run_id is None:
        record.run_id = _create_run(record, client)
        record.goes_on = False
        outbox.save()
    # First the tags: a RUNNING run of a process that is gone would be closed.
    _send_params_and_tags(outbox, client, record.run_id)
    if record.goes_on:
        client.update_run(record.run_id, "RUNNING")
        record.goes_on = False
        outbox.save()
    return record.run_id


def send_end(outbox: Outbox, client: MlflowClient) -> None:
    """Send all that is left of a run that has ended, and end it in MLflow too."""
    record = outbox.record
    run_id = send(outbox, client)
    now = record.end_ms or int(time.time() * 1000)
    finals = [Metric(k, v, now, record.last_step) for k, v in record.metrics.items()]
    for start in range(0, len(finals), MAX_BATCH_METRICS):
        client.log_batch(run_id, metrics=finals[start : start + MAX_BATCH_METRICS])
    _send_trials(outbox, client, run_id)
    for path in [
        *artifacts(outbox),
        *draw(outbox.points.parent, record.start_ms / 1000),
    ]:
        client.log_artifact(run_id, str(path))
    client.set_terminated(run_id, record.status, record.end_ms)
    record.complete = True
    record.delivered.append(record.tracking_uri)
    outbox.save()


def artifacts(outbox: Outbox) -> list[Path]:
    """Files of the run beside its points; none that an earlier run left."""
    folder, started_s = outbox.points.parent, outbox.record.start_ms / 1000
    named = [folder / name for name in (*ARTIFACTS, "environment.json")]
    return [p for p in named if p.is_file() and p.stat().st_mtime >= started_s]


def _create_run(record: RunRecord, client: MlflowClient) -> str:
    experiment = client.get_experiment_by_name(record.experiment)
    experiment_id = (
        experiment.experiment_id
        if experiment
        else client.create_experiment(record.experiment, record.artifact_location)
    )
    run = client.create_run(
        experiment_id, start_time=record.start_ms, run_name=record.name
    )
    return str(run.info.run_id)


def _send_params_and_tags(outbox: Outbox, client: MlflowClient, run_id: str) -> None:
    record = outbox.record
    params = [Param(k, v[:MAX_VALUE_LENGTH]) for k, v in list(record.params.items())]
    new_params = params[record.sent_params :]
    wanted = {**record.settled, **record.tags}
    tags = {k: v for k, v in wanted.items() if record.sent_tags.get(k) != v}
    if not new_params and not tags:
        return
    for start in range(0, len(new_params), MAX_BATCH_PARAMS):
        _log_params(client, run_id, new_params[start : start + MAX_BATCH_PARAMS])
    if tags:
        texts = [RunTag(k, v[:MAX_VALUE_LENGTH]) for k, v in tags.items()]
        client.log_batch(run_id, tags=texts)
    record.sent_params = len(params)
    record.sent_tags = {**record.sent_tags, **tags}
    outbox.save()


def _send_datasets(outbox: Outbox, client: MlflowClient, run_id: str) -> None:
    record = outbox.record
    new = record.datasets[record.sent_datasets :]
    if not new:
        return
    inputs = [
        DatasetInput(
            Dataset(
                name=facts["name"],
                digest=facts["digest"],
                source_type="local",
                source=json.dumps({"uri": facts["source"]}),
                profile=json.dumps({"num_rows": int(facts["rows"])}),
            ),
            tags=[InputTag("mlflow.data.context", facts["context"])],
        )
        for facts in new
    ]
    client.log_inputs(run_id, datasets=inputs)
    record.sent_datasets = len(record.datasets)
    outbox.save()


def _send_trials(outbox: Outbox, client: MlflowClient, run_id: str) -> None:
    record = outbox.record
    experiment_id = client.get_run(run_id).info.experiment_id
    # By the process's own a trial is closed that a kill leaves open.
    tags = {"mlflow.parentRunId": run_id, **process_tags()}
    for trial in record.trials[record.sent_trials :]:
        now = int(time.time() * 1000)  # a record of an earlier version has no times
        start_ms, end_ms = trial.get("start_ms", now), trial.get("end_ms", now)
        run = client.create_run(
            experiment_id, start_time=start_ms, run_name=trial["name"], tags=tags
        )
        client.log_batch(
            run.info.run_id,
            metrics=[Metric(k, v, end_ms, 0) for k, v in trial["metrics"].items()],
            params=[Param(k, str(v)) for k, v in trial["params"].items()],
        )
        client.set_terminated(run.info.run_id, trial["status"], end_ms)
        record.sent_trials += 1
        outbox.save()


def _log_params(client: MlflowClient, run_id: str, params: list[Param]) -> None:
    """A run that goes on may have another value now, which MLflow does not take."""
    try:
        client.log_batch(run_id, params=params)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        logger.warning("MLflow keeps the run's first parameters: %s", error.message)


def _lots(outbox: Outbox) -> Iterator[tuple[list[Metric], int]]:
    """New metrics in lots that MLflow takes, each with the file's length up to it."""
    record = outbox.record
    lot: list[Metric] = []
    end = record.sent_bytes
    for end_of_line, point in outbox.new_points():
        record.settled.update(report_tags(point.get("settled", {})))
        again = record.known_steps if end_of_line > record.known_bytes else {}
        found = [m for m in metrics_of(point) if m.step > again.get(m.key, -1)]
        if lot and len(lot) + len(found) > MAX_BATCH_METRICS:
            yield lot, end
            lot = []
        lot += found
        end = end_of_line
    if end > record.sent_bytes:
        yield lot, end
