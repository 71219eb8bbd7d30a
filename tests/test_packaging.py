"""Runs outside the project's folder: the package with its configuration, and the
image."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from flatout import __version__
from tests.conftest import PROJECT, kedro

INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(
        r"\\\n",
        " ",
        re.sub(r"^#.*\n", "", (PROJECT / "Dockerfile").read_text(), flags=re.M),
    ).splitlines()
    if line.strip()
]
IGNORED = [
    line
    for line in (PROJECT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def is_sent(path: Path) -> bool:
    """Return whether `path`, relative to the project, belongs to the build context. The
    last pattern that matches it or a folder above it decides."""
    sent = True
    above = [path, *path.parents][:-1]
    for pattern in IGNORED:
        plain = pattern.removeprefix("!").removeprefix("**/")
        names = [part.as_posix() for part in above]
        if pattern.startswith("**/"):
            names = list(path.parts)
        if any(fnmatch(name, plain) for name in names):
            sent = pattern.startswith("!")
    return sent


def build_image(app: Path) -> None:
    """Copy files as the COPY instructions do."""
    for rest in arguments("COPY"):
        *sources, target = [w for w in shlex.split(rest) if not w.startswith("--")]
        for source in sources:
            path = PROJECT / source
            files = [f for f in path.rglob("*") if f.is_file()] or [path]
            for file in filter(lambda f: is_sent(f.relative_to(PROJECT)), files):
                inside = (
                    app / target if file != path or target != "./" else app / source
                )
                copied = inside / file.relative_to(path) if file != path else inside
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copied)


AS_MODULE = """
import runpy, sys
sys.argv.pop(0)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", sorted({"torch", "transformers", "accelerate"} & {*sys.modules}))
"""
"""Runs `python -m ...` and prints which modules it has imported."""


def run(command: list[str], folder: Path, source: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AS_MODULE, *command, "--env=test"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / "data/08_reporting/split_report.json").read_text())
    assert report["rows_in"] == 400
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The image's folder /app, in which the image's command has run split without
    torch. Only this fixture parses the corpus itself."""
    app = tmp_path_factory.mktemp("app")
    build_image(app)
    [command] = arguments("CMD")
    program, *words = json.loads(command)
    assert program in entry_points(group="console_scripts").names
    said = run([program, *words, "--pipelines=split"], app, app / "src")
    assert "imported: []" in said
    return app


@pytest.mark.slow
@pytest.mark.process
def test_what_the_image_holds_is_enough_for_its_command(image):
    there = {path.name for path in image.iterdir()} - {".viz"}  # Kedro-Viz is in dev
    assert there == {
        *("LICENSE", "README.md", "conf", "data", "pyproject.toml"),
        *("requirements.lock", "src"),
    }


def installed_wheel(project: Path, site: Path) -> str:
    """Build the wheel as `kedro package` does, install it into `site`, and return its
    name. The installed setuptools is used, because an isolated one would be
    downloaded."""
    dist = project / "dist"
    build = ["build", "--wheel", "--no-isolation", "--outdir", str(dist), str(project)]
    install = ["pip", "install", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    [wheel] = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", *install, wheel], check=True)
    return wheel.name


@pytest.mark.process
@pytest.mark.slow
def test_the_wheel_trains_anywhere_with_its_archive_of_conf(
    image, empty_store, tmp_path, monkeypatch
):
    monkeypatch.delenv("DO_NOT_TRACK")
    project, site, folder = (tmp_path / name for name in ("project", "site", "any"))
    for name in ("src", "conf"):
        shutil.copytree(image / name, project / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(image / name, project)
    assert installed_wheel(project, site) == f"flatout-{__version__}-py3-none-any.whl"
    assert {path.name.split("-")[0] for path in site.iterdir()} <= {"flatout", "bin"}
    shutil.copytree(image / "data" / "01_raw", folder / "data" / "01_raw")
    shutil.copy(empty_store, folder / "data")
    archive = ["--exclude=local/*.yml", "-czf", str(folder / "conf-flatout.tar.gz")]
    subprocess.run(["tar", *archive, f"--directory={project}", "conf"], check=True)

    said = run(["flatout", "--conf-source=conf-flatout.tar.gz"], folder, site)
    assert "usage data" not in said
    assert {path.name for path in folder.iterdir()} == {"conf-flatout.tar.gz", "data"}
    report = json.loads((folder / "data/08_reporting/train_report.json").read_text())
    assert report["steps"] == 8
    assert (folder / "data/06_models/model/model.safetensors").exists()
    code = "import flatout; print(flatout.__file__)"
    asked = [sys.executable, "-c", code]
    there = subprocess.check_output(
        asked, cwd=folder, env={**os.environ, "PYTHONPATH": str(site)}, text=True
    )
    assert Path(there.strip()).is_relative_to(site)


def test_nothing_private_is_sent_to_the_image():
    for path in (
        "conf/local/parameters.yml",
        "conf/base/credentials.yml",
        "conf/tuned/parameters.yml",
        "data/mlflow.db",
        ".git/config",
        "src/flatout/__pycache__/cli.pyc",
        "src/flatout.egg-info/PKG-INFO",
    ):
        assert not is_sent(Path(path)), path
    for path in (
        "conf/local/.gitkeep",
        "conf/base/catalog.yml",
        "src/flatout/cli/run.py",
    ):
        assert is_sent(Path(path)), path


def test_the_image_is_made_of_what_the_project_names():
    project = (PROJECT / "pyproject.toml").read_text()
    assert arguments("FROM") == ["python:3.11-slim"]
    assert 'requires-python = ">=3.10,<3.14"' in project
    for rest in arguments("COPY"):
        for source in [w for w in rest.split()[:-1] if not w.startswith("--")]:
            assert (PROJECT / source).exists(), source
    install = next(rest for rest in arguments("RUN") if rest.startswith("pip "))
    assert "-c requirements.lock" in install
    [extras] = re.findall(r"\.\[([\w,]+)\]", install)
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    # The export pipeline writes ONNX, and deploy/trainjob.yaml keeps its mirror in S3.
    assert {"export", "s3"} <= {*extras.split(",")}
    [user] = arguments("USER")
    assert user != "root"
    assert f"useradd --create-home --uid 1000 {user}" in arguments("RUN")


@pytest.mark.process
def test_where_there_is_no_git_nothing_is_said_of_it(tmp_path):
    """The image has no git, and MLflow would log 48 lines about that in each run."""
    ask = (
        "import sys; assert 'git' not in sys.modules;"
        "from flatout.tracking.store import prepare; prepare('');"
        "from mlflow.utils.git_utils import get_git_commit;"
        "print(get_git_commit('.'))"
    )
    done = kedro("-c", ask, cwd=tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "None\n")
