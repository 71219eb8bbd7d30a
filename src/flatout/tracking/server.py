"""Start the MLflow UI (`kedro flatout ui`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from flatout.engine.machine.environment import set_defaults
from flatout.tracking.store import prepare

SERVER_DEFAULTS = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""One worker is enough for one user. Several workers and a job queue start slowly."""


def serve(uri: str, tell: Callable[[str], object], *, host: str, port: str) -> int:
    """Serve the MLflow UI for the store at `uri` until this process is stopped, and
    return the exit code. `tell` prints the address. If the store is a server, it has
    its own UI, so that only its address is printed."""
    prepare(uri)
    is_server = uri.startswith("http")
    tell(f"Runs: {uri.rstrip('/') if is_server else f'http://{host}:{port}'}")
    if is_server:
        return 0
    set_defaults(SERVER_DEFAULTS)
    server = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    process = subprocess.Popen(
        [*server, "--host", host, "--port", port], start_new_session=True
    )

    def stop(*_: object) -> None:
        """Stop the server's processes together with this process."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    return process.wait()
