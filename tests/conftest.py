"""What all tests share: the project, a folder of its own, no network, clean MLflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

os.environ.update(
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    # Threads that wait give the core to the other test process at once.
    OMP_WAIT_POLICY="PASSIVE",
)

PROJECT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes first: they take longest, and a file goes to
    one test process."""
    slow = Counter(i.path for i in items if i.get_closest_marker("process"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


@pytest.fixture(autouse=True)
def _no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests names no tracking store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking store as a SQLite file; making one takes MLflow seconds."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """URI of a fresh tracking store."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def kedro(
    *arguments: str, cwd: Path = PROJECT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`kedro ...` in the project, as a user types it; output as one text."""
    return subprocess.run(
        [sys.executable, "-m", "kedro", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
