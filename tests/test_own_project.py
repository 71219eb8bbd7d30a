"""flatout in another Kedro project, as described in docs/own_project.md."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kedro.config import OmegaConfigLoader
from kedro.framework import project as framework
from kedro.framework.project import pipelines
from kedro.pipeline import Node, Pipeline

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.pipeline_registry import DEFAULT, flatout_pipelines
from flatout.project import terminal
from flatout.project.command_line import CommandError, check_pipelines
from flatout.project.config_loader import loader_of
from flatout.project.fitting import fit_pipelines, short_names
from flatout.project.hooks.clock import phase_of
from tests.conftest import PROJECT, kedro
from tests.projects import interrupted, ran

PAGE = PROJECT / "docs/own_project.md"
FILE = re.compile(r"^`((?:src|conf)/\S+)`.*?\n```\w+\n(.*?)```", re.M | re.S)


def identity(x):
    return x


@pytest.fixture
def registered():
    """Restore the registered pipelines, which Kedro stores for the whole process."""
    before = dict(pipelines)
    yield pipelines
    pipelines.update(before)


def test_the_namespace_is_a_box_and_entries_keep_their_names():
    boxed, plain = flatout_pipelines(namespace="reviews"), flatout_pipelines()
    assert set(DEFAULT) < set(boxed)
    for name, pipeline in boxed.items():
        assert pipeline.datasets() == plain[name].datasets()
        assert short_names(pipeline) == short_names(plain[name])
    [node] = boxed["train"].nodes
    assert node.name == "reviews.train.train_model"
    assert phase_of(node) == phase_of(plain["train"].nodes[0])
    assert "train_images" in flatout_pipelines(rows="images")["train"].inputs()


def test_fitting_keeps_the_namespace_and_pipelines_that_are_not_flatouts(registered):
    own = Pipeline([Node(identity, "a", "b", name="own")])
    registered.update({**flatout_pipelines("reviews"), "split": own})
    fit_pipelines(parse_settings({"train": {"rows": "images"}}))
    assert registered["train"].nodes[0].name == "reviews.train.train_model"
    assert "train_images" in registered["train"].inputs()
    fit_pipelines(parse_settings({}))
    assert registered["split"] == own


def test_hooks_without_the_loader_name_the_remedy(tmp_path):
    class Context:
        config_loader = OmegaConfigLoader(str(tmp_path))

    with pytest.raises(SettingsError, match=r"from flatout\.settings import \*"):
        loader_of(Context())


def test_the_parameter_pipelines_may_name_ones_own(monkeypatch, registered):
    registered.update({"verdict": Pipeline([])})
    with pytest.raises(CommandError):
        check_pipelines(["verdict"])
    monkeypatch.setattr(framework, "PACKAGE_NAME", "mine")
    check_pipelines(["verdict", "train"])
    with pytest.raises(CommandError, match="did you mean verdict"):
        check_pipelines(["verdit"])


@pytest.mark.parametrize(("text", "changed"), [("", False), ('"flatout"', True)])
def test_the_terminal_of_another_project_stays(tmp_path, monkeypatch, text, changed):
    content = f'[tool.kedro]\npackage_name = "mine"\ndependencies = [{text}]\n'
    (tmp_path / "pyproject.toml").write_text(content)
    monkeypatch.chdir(tmp_path)
    called = []
    monkeypatch.setattr(terminal, "print_lines", lambda: called.append(1))
    terminal.set_up_terminal()
    assert bool(called) == changed


def build(folder: Path) -> Path:
    """Build the project of the page, with the small model of conf/test in
    conf/local."""
    asked = ["new", "--name=mine", "--tools=none", "--example=n"]
    command = [sys.executable, "-m", "kedro", *asked]
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    own = folder / "mine"
    shutil.copytree(PROJECT / "conf/base", own / "conf/base/flatout")
    shutil.copy(PROJECT / "conf/logging.yml", own / "conf")
    for name, text in FILE.findall(PAGE.read_text()):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    shutil.copy(PROJECT / "conf/test/parameters.yml", own / "conf/local")
    return own


@pytest.mark.process
@pytest.mark.slow
def test_a_project_from_the_starter_trains_resumes_and_is_packaged(tmp_path):
    own = build(tmp_path)
    reports = own / "data/08_reporting"
    longer = "train.max_steps=60,train.epochs=20,train.checkpoint.every_steps=5"
    params = f"--params={longer}"
    saved = lambda: list(own.glob("data/06_models/checkpoints/step*"))  # noqa: E731
    interrupted(["run", params], own / "log", saved, signal.SIGKILL, own)
    ran("run", params, cwd=own)
    report = json.loads((reports / "train_report.json").read_text())
    assert report["steps"] == 60
    assert report["resumed_from_step"] >= 5
    verdict = json.loads((reports / "verdict.json").read_text())
    assert verdict["loss"] == report["validation_loss"]

    tokens = own / "data/05_model_input/train_tokens"
    before = {f: f.stat().st_mtime_ns for f in tokens.rglob("*.arrow")}
    ran("run", "--env=large", "--pipelines=train", cwd=own)
    for folder, size in (("model", 32), ("large/model", 64)):
        config = json.loads((own / f"data/06_models/{folder}/config.json").read_text())
        assert config["hidden_size"] == size
    assert {f: f.stat().st_mtime_ns for f in tokens.rglob("*.arrow")} == before

    goes_on = "model.name_or_path=data/06_models/model,data_dir=data_new"
    ran("run", f"--params={goes_on},review.good_loss=0", cwd=own)
    assert (own / "data_new/06_models/model/model.safetensors").is_file()
    verdict = json.loads((reports / "verdict.json").read_text())
    assert verdict["is_good"] is False

    ran("run", "--runner=ThreadRunner", "--to-nodes=split_rows", cwd=own)
    done = kedro("run", "--runner=ThreadRunner", "--from-nodes=train_model", cwd=own)
    assert done.returncode == 2
    assert "cannot run in a ParallelRunner or ThreadRunner" in done.stdout
    ran("package", cwd=own)
    names = sorted(path.name for path in (own / "dist").iterdir())
    assert names == ["conf-mine.tar.gz", "mine-0.1-py3-none-any.whl"]
