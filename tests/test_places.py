"""A session writes below its project, no matter where it was started."""

import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.places import check_store, project_path, tracking_store, use_project
from flatout.project.config_loader import with_absolute_paths
from tests.command_runs import small_project
from tests.projects import ran, runs_of

CODE = """
import sys
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
bootstrap_project(sys.argv[1])
with KedroSession.create(project_path=sys.argv[1]) as session:
    session.run(pipeline_names=["split", "tokenize", "train"])
"""
WRITTEN = (
    "mlflow.db",
    "mlartifacts",
    "05_model_input/train_tokens",
    "06_models/model",
    "06_models/checkpoints",
    "08_reporting/train_metrics.jsonl",
    "08_reporting/guard.json",
)


@pytest.mark.process
def test_a_session_started_elsewhere_writes_into_its_project(tmp_path, data):
    """This is also true if the folder's name contains characters with a meaning in
    URLs."""
    project = small_project(tmp_path / "my project #1 ä", data)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran("-c", CODE, str(project), cwd=elsewhere)
    assert not [*elsewhere.iterdir()]
    for name in WRITTEN:
        assert (project / "data" / name).exists(), name
    [run] = runs_of(project / "data")
    assert run.info.status == "FINISHED"
    place = unquote(run.info.artifact_uri).removeprefix("file://")
    assert place.startswith(str(project / "data/mlartifacts"))


def test_relative_paths_of_parameters_start_at_the_project(tmp_path, monkeypatch):
    elsewhere, project = tmp_path / "elsewhere", tmp_path / "project"
    elsewhere.mkdir()
    (project / "models" / "mine").mkdir(parents=True)
    given = {
        "model": {"name_or_path": "models/mine"},
        "paths": {"checkpoints": "kept", "metrics": "/at/its/place.jsonl"},
        "sweep": {"storage": "postgresql://host/sweeps"},
    }
    monkeypatch.chdir(elsewhere)
    use_project(project)
    found = with_absolute_paths(parse_settings(given))
    assert found.model.name_or_path == str(project / "models/mine")
    assert found.paths.checkpoints == str(project / "kept")
    assert found.paths.metrics == "/at/its/place.jsonl"
    assert found.sweep.storage == "postgresql://host/sweeps"
    for group in (found.benchmark, found.export, found.mine):
        assert group.folder.startswith(str(project))
    hub = {"model": {"name_or_path": "bert-base-uncased"}}
    assert (
        with_absolute_paths(parse_settings(hub)).model.name_or_path
        == "bert-base-uncased"
    )
    monkeypatch.chdir(project)
    assert with_absolute_paths(parse_settings(given)) == parse_settings(given)


def test_without_a_session_the_project_is_that_of_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert project_path("data") == str(tmp_path / "data")
    shutil.copy(Path(__file__).parents[1] / "pyproject.toml", tmp_path)
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert project_path("data") == str(tmp_path / "data")


@pytest.mark.parametrize("name", ["50%20", "what?"])
def test_a_folder_that_mlflow_cannot_name_is_refused(tmp_path, name):
    for folder in (tmp_path / name / "data", tmp_path / "a b#ä"):
        store = tracking_store(str(folder))
        if name in str(folder):
            with pytest.raises(SettingsError, match="MLflow reads % and"):
                check_store(store, None)
            with pytest.raises(SettingsError, match="MLflow reads % and"):
                check_store("postgresql://host/mlflow", f"{folder}/mlartifacts")
        else:
            check_store(store, f"{folder}/mlartifacts")
    check_store("https://host/what%20?", None)
