"""Set client timeouts for the tracking store, and turn its failures into errors that
tell users what to fix."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.engine.files.identity import runs_since
from flatout.engine.machine.environment import preserve_tracking_uri, set_defaults
from flatout.engine.parameters.faults import first_line

if TYPE_CHECKING:  # a run's process should not import MLflow
    from mlflow import MlflowClient
    from mlflow.entities import Run

HOST_TAG, PID_TAG, STARTED_TAG = "flatout.host", "flatout.pid", "flatout.started_s"

# With its default limits, MLflow waits minutes for a dead server.
CLIENT_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Without git, as in a container, MLflow would log 48 lines per run.
    "GIT_PYTHON_REFRESH": "quiet",
}


def prepare(tracking_uri: str) -> None:
    """Set short timeouts for MLflow's clients, and create the folder of a SQLite
    store."""
    set_defaults(CLIENT_LIMITS)
    # Otherwise MLflow would log the tables of a new SQLite file, and a hundred lines
    # for each error that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    file = _sqlite_file(tracking_uri)
    if file is not None:
        with suppress(OSError):  # the store will report the error
            file.parent.mkdir(parents=True, exist_ok=True)


def connect(tracking_uri: str) -> MlflowClient:
    """Return a client with short timeouts for the store at `tracking_uri`. Parts of
    MLflow that do not use this client, such as its flavors, are set to this store."""
    import mlflow
    from mlflow import MlflowClient

    prepare(tracking_uri)
    with preserve_tracking_uri():
        mlflow.set_tracking_uri(tracking_uri)
    return MlflowClient(tracking_uri)


def _sqlite_file(tracking_uri: str) -> Path | None:
    scheme, _, path = tracking_uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None


def default_artifact_location(tracking_uri: str) -> str | None:
    """Return the artifact folder for a SQLite store, for which MLflow would otherwise
    use the working directory. For other stores, the result is None."""
    file = _sqlite_file(tracking_uri)
    return None if file is None else str(file.parent.absolute() / "mlartifacts")


def one_line(error: BaseException) -> str:
    """Return the first line of an error message, shortened for use in a warning."""
    text = first_line(error)
    return text if len(text) <= 200 else f"{text[:200]}..."


def process_tags() -> dict[str, str]:
    """Return tags that let another process check whether this process is alive."""
    started_s = psutil.Process().create_time()
    return {
        HOST_TAG: socket.gethostname(),
        PID_TAG: str(os.getpid()),
        STARTED_TAG: f"{started_s:.2f}",
    }


def process_lives(tags: Mapping[str, Any]) -> bool:
    """Return whether the process described by `process_tags` is running. Processes on
    other hosts are assumed to be running."""
    if tags.get(HOST_TAG) != socket.gethostname():
        return HOST_TAG in tags
    try:
        return runs_since(int(tags[PID_TAG]), float(tags[STARTED_TAG]))
    except (KeyError, ValueError):
        return False


def find_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """Return the run, or None if it does not exist in the store or was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run and run.info.lifecycle_stage == "active" else None
