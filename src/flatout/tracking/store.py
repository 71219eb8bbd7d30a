"""The tracking store: limits of its client, and faults that users can correct."""

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
from flatout.engine.files.writable import ELSEWHERE
from flatout.engine.machine.environment import preserve_tracking_uri, set_defaults
from flatout.engine.parameters.faults import first_line

if TYPE_CHECKING:  # a run's process avoids these imports
    from mlflow import MlflowClient
    from mlflow.entities import Run

HOST_TAG, PID_TAG, STARTED_TAG = "flatout.host", "flatout.pid", "flatout.started_s"

# MLflow's own defaults wait for minutes on a dead server.
CLIENT_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Without git (as in a container) MLflow would log 48 lines per training.
    "GIT_PYTHON_REFRESH": "quiet",
}


def prepare(tracking_uri: str) -> None:
    """Set short limits for this process's MLflow client; create a SQLite folder."""
    set_defaults(CLIENT_LIMITS)
    # MLflow would log the tables of a new SQLite file, and a hundred lines for each
    # error, which it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    file = _sqlite_file(tracking_uri)
    if file is not None:
        with suppress(OSError):  # the store then reports the fault
            file.parent.mkdir(parents=True, exist_ok=True)


def connect(tracking_uri: str, registry_uri: str | None = None) -> MlflowClient:
    """Return a client with short limits. Code that calls MLflow without a client, for
    example its flavors, uses the same store."""
    import mlflow
    from mlflow import MlflowClient

    prepare(tracking_uri)
    with preserve_tracking_uri():
        mlflow.set_tracking_uri(tracking_uri)
        mlflow.set_registry_uri(registry_uri or tracking_uri)
    return MlflowClient(tracking_uri, registry_uri)


def _sqlite_file(tracking_uri: str) -> Path | None:
    scheme = "sqlite:///"
    return (
        Path(tracking_uri.removeprefix(scheme))
        if tracking_uri.startswith(scheme)
        else None
    )


def default_artifact_location(tracking_uri: str) -> str | None:
    """Return the folder for files of a SQLite store: MLflow would use the working
    directory. None: the store decides."""
    file = _sqlite_file(tracking_uri)
    return None if file is None else str(file.parent.absolute() / "mlartifacts")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, short enough for a warning."""
    text = first_line(error)
    return text if len(text) <= 200 else f"{text[:200]}..."


LOGIN = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
    "MLFLOW_TRACKING_TOKEN), or name them in conf/local/credentials.yml "
    "(server.credentials of conf/base/mlflow.yml)"
)
UNWRITABLE = ("attempt to write a readonly database", "unable to open database file")
"""SQLite's messages for a file or folder that is not writable."""


def cause(error: BaseException) -> str:
    """Return why a store fails in one line, with a remedy if one is known."""
    text = one_line(error)
    if any(said in str(error) for said in UNWRITABLE):
        return f"this user cannot write it; another place: {ELSEWHERE}"
    if "error code 401" in text:
        return f"it requires a login (401): {LOGIN}"
    if "error code 403" in text:
        return f"this login has no permission (403): {LOGIN}"
    return text


def process_tags() -> dict[str, str]:
    """Return tags by which a later process can check whether this one is alive."""
    started_s = psutil.Process().create_time()
    return {
        HOST_TAG: socket.gethostname(),
        PID_TAG: str(os.getpid()),
        STARTED_TAG: f"{started_s:.2f}",
    }


def process_lives(tags: Mapping[str, Any]) -> bool:
    """Return True if the process of `process_tags` runs, or is on another host."""
    if tags.get(HOST_TAG) != socket.gethostname():
        return HOST_TAG in tags
    try:
        return runs_since(int(tags[PID_TAG]), float(tags[STARTED_TAG]))
    except (KeyError, ValueError):
        return False


def find_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """Return the run; None if the store does not have it, or has deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run and run.info.lifecycle_stage == "active" else None
