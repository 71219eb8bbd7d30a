"""MLflow's and Kedro-Viz's pages in a real browser, headless."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flatout import tracking
from tests.conftest import PROJECT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


def free_port() -> int:
    """Below the ephemeral ports: Kedro-Viz takes no others."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


@contextmanager
def served(command: list[str], url: str, log: Path) -> Iterator[None]:
    """The server of `command` while it answers at `url`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(url, timeout=2):
                    break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shows(url: str, profile: Path, *texts: str) -> bool:
    """Whether the page has all `texts`; a busy machine may need another look."""
    return any(
        all(text in document for text in texts)
        for document in (page(url, profile) for _ in range(8))
    )


def page(url: str, profile: Path) -> str:
    """The page's document once its scripts have run."""
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",  # as root, in containers
            "--disable-gpu",
            "--window-size=1600,1400",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=60000",
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_mlflow_shows_the_run_and_its_rate(store: str, tmp_path: Path):
    points = tmp_path / "train_metrics.jsonl"
    record = tracking.RunRecord(
        tracking_uri=store,
        experiment="flatout",
        name="bert-2x32_cpu_b16",
        artifact_location=str(tmp_path / "artifacts"),
    )
    outbox = tracking.begin(points, record, goes_on=False)
    lines = (
        {
            "step": step,
            "time_s": 1_700_000_000,
            "metrics": {"train_samples_per_second": 9},
        }
        for step in range(1, 5)
    )
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forwarder = tracking.Forwarder(outbox)
    forwarder.start()
    assert forwarder.finish("FINISHED", record.start_ms + 1000)

    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store]
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    experiment = "1"
    with served([*command, *where], f"{address}/health", tmp_path / "log"):
        profile, runs = (
            tmp_path / "profile",
            f"{address}/#/experiments/{experiment}/runs",
        )
        assert shows(runs, profile, "bert-2x32_cpu_b16")
        charts = f"{runs}/{record.run_id}/model-metrics"
        assert shows(charts, profile, "train_samples_per_second")


def test_kedro_viz_shows_the_pipelines(tmp_path: Path):
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "kedro", "viz", "run", "--no-browser"]
    with served(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        address,
        tmp_path / "log",
    ):
        url, profile = f"{address}/?pid=__default__", tmp_path / "profile"
        assert shows(url, profile, "split_rows", "make_tokenizer", "train_model")
