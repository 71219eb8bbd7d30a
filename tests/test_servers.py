"""`make ui` and `make viz` as a newcomer types them: they answer, and end whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.conftest import PROJECT
from tests.servers import QUICKER, end_all, free_port, listening, of_session, wait_for

pytestmark = pytest.mark.process

MAKE = ("make", "-o", ".venv/runtime", "-o", ".venv/dev")
"""With what is installed as it is."""


@pytest.mark.parametrize(
    ("target", "path", "shown", "stop", "signum"),
    [
        # Ctrl-C reaches every process; make passes SIGTERM to kedro alone.
        ("ui", "/health", b"OK", os.kill, signal.SIGTERM),
        ("viz", "/api/main", b"train_model", os.killpg, signal.SIGINT),
    ],
)
def test_a_make_target_serves_in_a_shell_that_activated_nothing(
    store: str, tmp_path: Path, target, path, shown, stop, signum
):
    port, log = free_port(), tmp_path / "log"
    own = f"BIN={Path(sys.executable).parent}"
    variables = {"MLFLOW_TRACKING_URI": store, "BROWSER": "true", **QUICKER}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MAKE, own, target, f"PORT={port}"],
            cwd=PROJECT,
            env={**warm.not_activated(), **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert shown in wait_for(f"http://127.0.0.1:{port}{path}", process, log)
        if target == "ui":
            said = f"Runs: http://127.0.0.1:{port}"
            assert said in log.read_text()
        assert listening(process.pid) == {("127.0.0.1", port)}
        others = psutil.Process(process.pid).children(recursive=True)
        stop(process.pid, signum)
        process.wait(60)
        for one in {*of_session(process.pid), *others}:
            one.wait(60)
    finally:
        end_all(process.pid)
