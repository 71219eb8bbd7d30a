"""`kedro flatout ui`: MLflow's pages, with the address of the runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from mlflow import MlflowClient

from flatout.engine.machine.environment import set_defaults
from flatout.tracking.pages.experiment import runs_page
from flatout.tracking.store import one_line, prepare

SERVER_DEFAULTS = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""One person looks: four workers and a queue of jobs start for seconds."""


def serve(
    uri: str, experiment: str, tell: Callable[[str], object], *, host: str, port: str
) -> int:
    """Serve the store at `uri` until it is stopped, and return the server's status. A
    store that is a server itself has pages of its own: they are only named."""
    prepare(uri)
    is_server = uri.startswith("http")
    address = uri.rstrip("/") if is_server else f"http://{host}:{port}"
    tell(_address_line(uri, experiment, address))
    if is_server:
        return 0
    set_defaults(SERVER_DEFAULTS)
    server = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    return subprocess.call([*server, "--host", host, "--port", port])


def _address_line(uri: str, experiment: str, address: str) -> str:
    try:
        found = MlflowClient(uri).get_experiment_by_name(experiment)
    except Exception as error:  # the server says more of it
        return f"MLflow at {address} ({one_line(error)})"
    if found is None:
        return f"MLflow at {address}. It has no run yet: kedro run makes one."
    return f"Runs: {address}/{runs_page(found.experiment_id)}"
