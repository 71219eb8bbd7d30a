"""A data folder that the user cannot write to is reported before any node runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatout.engine.files import writable
from tests.conftest import kedro
from tests.projects import ran
from tests.warm import BOUND_BY_PERMISSIONS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="drops Linux capabilities"),
]
AS_A_USER = {BOUND_BY_PERMISSIONS: "1"}


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield
    finally:
        path.chmod(before)


def files_below(folder: Path) -> dict[Path, int]:
    """Return all files except the lock of the data folder."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {p: p.stat().st_size for p in files if not p.name.startswith(".lock")}


SAID = "cannot be written by this user"
ELSEWHERE = "--params=data_dir=/another/disk"


def shown(path: Path) -> str:
    return f"{path}/" if path.is_dir() else f"{path}"


@pytest.mark.parametrize(
    ("place", "pipeline"),
    [
        ("", "split"),
        ("mlflow.db", "split"),
        ("03_primary", "split"),
        ("03_primary/train_rows", "split"),
        ("08_reporting/train_report.json", "train"),
    ],
)
def test_what_cannot_be_written_is_named_before_any_node(data, place, pipeline):
    (data / "03_primary" / "train_rows").mkdir(parents=True)
    (data / "08_reporting").mkdir()
    (data / "08_reporting" / "train_report.json").write_text("{}")
    before = files_below(data)
    options = ("--env=test", f"--pipelines={pipeline}", f"--params=data_dir={data}")
    with read_only(data / place):
        done = kedro("run", *options, **AS_A_USER)
    assert done.returncode == 2
    last = done.stdout.splitlines()[-1]
    assert last == f"Error: {shown(data / place)} {SAID}: {ELSEWHERE}"
    assert "Traceback" not in done.stdout
    assert "trained" not in done.stdout
    assert files_below(data) == before


def test_the_root_folder_has_one_slash():
    assert writable.shown(Path("/")) == "/"


def test_the_doctor_says_the_same(data):
    options = ("--env=test", "--json", f"--params=data_dir={data}")
    with read_only(data):
        done = kedro("doctor", *options, **AS_A_USER)
    rows = json.loads(done.stdout.splitlines()[-1])
    found = {row.pop("check"): row for row in rows}["disk"]
    said = f"{shown(data)} {SAID}"
    assert found == {"status": "fail", "finding": said, "fix": ELSEWHERE}
    assert done.returncode == 1


def test_a_store_elsewhere_that_cannot_be_written_costs_a_line(data, store):
    file = Path(store.removeprefix("sqlite:///"))
    arguments = ("run", "--pipelines=split", "--env=test", f"--params=data_dir={data}")
    with read_only(file):
        output = ran(*arguments, **AS_A_USER, MLFLOW_TRACKING_URI=store)
    said = " ".join(output.split())
    assert "does not have" in said
    assert f"`kedro flatout sync --data-dir={data}` sends it" in said
    assert "Traceback" not in said
