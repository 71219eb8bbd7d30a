"""Fixtures that all tests share: the project, temporary folders, no network, and a
clean MLflow state."""

import fcntl
import gc
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
import yaml

from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.machine.garbage import collect_as_usual, collect_rarely
from flatout.places import use_project
from tests import warm

# No test asserts wall times, and none limits the time of drawing its examples.
hypothesis.settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("busy machine")

PROJECT = Path(__file__).parents[1]
CORPUS = yaml.safe_load((PROJECT / "conf/test/parameters.yml").read_text())["corpus"]


def _at_once(_: int) -> None:
    """Skip syncing to disk, because no test simulates a power failure."""


os.fsync = _at_once


def pytest_configure() -> None:
    collect_rarely()  # the imports of all tests


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist
        warm.fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files first whose tests are slow, start processes or are many, because each
    file runs in a single test process."""
    cost: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        cost[item.path] += 1 + 40 * ("process" in marks) + 400 * ("slow" in marks)
    items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects are permanent: garbage collection skips them
    collect_as_usual()


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


os.environ.pop("MLFLOW_TRACKING_URI", None)  # of the user who runs the tests


@pytest.fixture(autouse=True)
def _no_tracking_server() -> Iterator[None]:
    """Reset the tracking store. MLflow writes it to the environment, where it would
    affect the fixtures of the next module."""
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(autouse=True)
def _no_project() -> Iterator[None]:
    """Reset the project that a session has set as the root of relative paths."""
    yield
    use_project(None)


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files that are created only once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def first_makes(file: Path) -> Iterator[bool]:
    """Yield whether `file` must still be created. One test process creates it while the
    others wait."""
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not file.exists()


@pytest.fixture(scope="session")
def empty_store(common: Path) -> Path:
    """An empty tracking store in a SQLite file, which takes MLflow seconds to
    create."""
    from mlflow import MlflowClient

    with first_makes(file := common / "mlflow.db") as missing:
        if missing:
            MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(scope="session")
def corpus(common: Path) -> Path:
    """The folder of conf/test's corpus, because parsing it takes longer than most
    tests."""
    from flatout.datasets import DocstringCorpus

    with first_makes(folder := common / "corpus") as missing:
        if missing:
            DocstringCorpus(filepath=str(folder), **CORPUS).load()
    return folder


@pytest.fixture
def data(corpus: Path, empty_store: Path, tmp_path: Path) -> Path:
    """A data folder with the parsed corpus and a tracking store without runs."""
    return started(tmp_path / "data", corpus, empty_store)


def started(folder: Path, corpus: Path, empty_store: Path) -> Path:
    shutil.copytree(corpus, folder / "01_raw")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """URI of a fresh tracking store."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Make the launcher fork this process, so that ranks do not repeat its imports."""
    from flatout.engine.launch import supervisor
    from tests.forks import FORKING

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "subprocess", FORKING)
        yield


@pytest.fixture
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in forks of a process that has already imported all modules."""
    monkeypatch.setattr(trials, "_start", warm.start_trial)


def kedro(
    *arguments: str, cwd: Path = PROJECT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `kedro ...` in the project as a user would. The output is a single text."""
    with tempfile.NamedTemporaryFile() as output:
        process = warm.start([*arguments], Path(output.name), cwd, variables)
        status = process.wait()
        text = output.read().decode(errors="replace")
    return subprocess.CompletedProcess(["kedro", *arguments], status, text)
