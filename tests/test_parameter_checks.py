"""Values that no code would read or check are refused before the run."""

import pytest
from kedro.framework.project import configure_project

from flatout.engine.parameters import SettingsError
from flatout.places import artifact_folder
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.parameters.checks import check_sources
from flatout.settings import CONFIG_LOADER_ARGS
from tests.conftest import PROJECT


def fault(tmp_path, text, name="parameters.yml", given=None, base="", more=""):
    """Return the error message for a file in conf/local, or "" if there is none."""
    configure_project("flatout")
    for folder in ("base", "local"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "base" / "parameters.yml").write_text(f"runtime: {{seed: 1}}\n{more}")
    (tmp_path / "base" / "catalog.yml").write_text(base)
    (tmp_path / "local" / name).write_text(text)
    options = {**CONFIG_LOADER_ARGS, "custom_resolvers": {}}
    loader = ProjectConfigLoader(str(tmp_path), None, given, **options)
    try:
        check_sources(loader)
    except SettingsError as error:
        return str(error)
    return ""


def test_sessions_under_the_name_of_texts_are_refused(tmp_path):
    task = "model: {task: next-key, config: {model_type: log_key_lstm}}"
    said = fault(tmp_path, "raw_texts: {type: b}", "catalog.yml", base=BASE, more=task)
    assert said.endswith("raw_sessions: rename raw_texts in conf/local")


def test_globals_of_an_earlier_version_name_their_new_place(tmp_path):
    assert fault(tmp_path, "corpus: {rows: 50}", "globals.yml") == (
        "corpus in globals.yml is no longer read since version 0.2: move it to "
        "conf/local/parameters.yml"
    )
    assert fault(tmp_path / "other", "mine: 3", "globals.yml") == ""


BASE = "raw_texts: {type: a}\npredict_texts: {type: a}\ntrain_reports: {type: a}\n"
BASE += "'{split}_tokens': {type: a}\n"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("raw_text", "raw_texts"),
        ("rawtexts", "raw_texts"),
        ("raw-texts", "raw_texts"),
        ("Raw_texts", "raw_texts"),
        ("predict_text", "predict_texts"),
        ("train_token", "train_tokens"),
        ("raw_validation_text", "raw_validation_texts"),
    ],
)
def test_a_misspelt_catalog_entry_is_refused_with_the_nearest(tmp_path, name, right):
    said = fault(tmp_path, f"{name}: {{type: b}}", "catalog.yml", base=BASE)
    assert said == (
        f"catalog entry {name}: no pipeline uses it; did you mean {right}? Rename it, "
        "or remove it; names that begin with _ are not checked"
    )


@pytest.mark.parametrize(
    "text",
    [
        "raw_texts: {type: b}",
        "raw_texts@pandas: {type: b}",
        "raw_texts: {type: b}\nraw_texts2: {type: c}",  # stored next to the one in use
        "_raw_text: {type: b}",
        "'{name}_texts': {type: b}",
        "raw_train_texts: {type: b}\nraw_test_texts: {type: b}",
        "train_tokens: {type: b}",
        "train_report: {type: b}",  # missing in this base, but used by a pipeline
        "reviews: {type: b}",
    ],
)
def test_catalog_entries_of_other_names_pass(tmp_path, text):
    assert fault(tmp_path, text, "catalog.yml", base=BASE) == ""


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        (None, f"{PROJECT}/data/mlartifacts"),
        ("sqlite:////else/mlflow.db", f"{PROJECT}/data/mlartifacts"),
        ("mlruns", f"{PROJECT}/data/mlartifacts"),
        ("http://127.0.0.1:5000", None),
        ("https://host/mlflow", None),
        ("databricks", None),
        ("databricks://profile", None),
    ],
)
def test_artifacts_are_beside_the_data_where_no_server_keeps_them(
    monkeypatch, uri, folder
):
    monkeypatch.chdir(PROJECT)
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert artifact_folder("data") == folder
