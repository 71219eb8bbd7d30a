"""Values that nothing would read, or nobody would check, are refused beforehand."""

from __future__ import annotations

import pytest

from flatout.engine.parameters import SettingsError
from flatout.places import artifact_folder
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.parameters.checks import check_sources
from flatout.project.parameters.entries import refuse_misspelt_options
from flatout.settings import CONFIG_LOADER_ARGS
from tests.conftest import PROJECT


def fault(tmp_path, text, name="parameters.yml", given=None, base=""):
    """What is said of a file in conf/local; empty where nothing is."""
    for folder in ("base", "local"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "globals.yml").write_text("corpus: {rows: 50, labels: 2}")
    (tmp_path / "base" / "parameters.yml").write_text("runtime: {seed: 1}")
    (tmp_path / "base" / "catalog.yml").write_text(base)
    (tmp_path / "local" / name).write_text(text)
    options = {**CONFIG_LOADER_ARGS, "custom_resolvers": {}}
    loader = ProjectConfigLoader(str(tmp_path), None, given, **options)
    try:
        check_sources(loader)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("corpus: {rows: 0}", "  corpus.rows: should be greater than or equal to 10"),
        ("corpus: {row: 500}", "unknown parameter; did you mean corpus.rows?"),
        ("corpus: {labels: null}", "corpus.labels must be set in conf/base/globals"),
    ],
)
def test_globals_are_checked(tmp_path, text, said):
    assert said in fault(tmp_path, text, "globals.yml")


@pytest.mark.parametrize("text", ["corpus: {rows: null}", "mine: 3"])
def test_good_globals_pass(tmp_path, text):
    assert fault(tmp_path, text, "globals.yml") == ""


def test_parameters_that_nothing_reads_say_where_they_belong(tmp_path):
    assert fault(tmp_path, "corpus: {rows: 500}\ndata_dir: /else\n") == (
        "corpus.rows in a parameters file changes nothing: set it in "
        "conf/local/globals.yml, or with --params=corpus.rows=500; data_dir in a "
        "parameters file changes nothing: give it with --params=data_dir=/else"
    )


def test_the_same_on_the_command_line_is_read(tmp_path):
    given = {"corpus": {"rows": 500}, "data_dir": "/else"}
    assert fault(tmp_path, "runtime: {seed: 3}", given=given) == ""


BASE = "raw_texts: {type: a}\npredict_texts: {type: a}\ntrain_reports: {type: a}\n"


@pytest.mark.parametrize(
    "name", ["raw_text", "rawtexts", "raw-texts", "Raw_texts", "predict_text"]
)
def test_a_misspelt_catalog_entry_is_refused_with_the_nearest(tmp_path, name):
    right = "predict_texts" if name == "predict_text" else "raw_texts"
    said = fault(tmp_path, f"{name}: {{type: b}}", "catalog.yml", base=BASE)
    assert said == (
        f"catalog entry {name} in conf/local: no pipeline uses it; did you mean "
        f"{right}? Rename it, or take it out; a name that begins with _ is left alone"
    )


@pytest.mark.parametrize(
    "text",
    [
        "raw_texts: {type: b}",
        "raw_texts@pandas: {type: b}",
        "raw_texts: {type: b}\nraw_texts2: {type: c}",  # kept beside the one in use
        "_raw_text: {type: b}",
        "'{name}_texts': {type: b}",
        "train_report: {type: b}",  # no entry of this base, but a pipeline's
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


def option_faults(tmp_path, entry, pipeline=("raw_texts",)):
    (tmp_path / "base").mkdir()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "catalog.yml").write_text(f"raw_texts: {entry}")
    options = {**CONFIG_LOADER_ARGS, "custom_resolvers": {}}
    loader = ProjectConfigLoader(str(tmp_path), None, **options)
    try:
        refuse_misspelt_options(loader, pipeline)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            "{type: flatout.datasets.TextFiles, filepath: a.csv, delimeter: ;}",
            "flatout.datasets.TextFiles has no delimeter; did you mean delimiter?",
        ),
        (
            "{type: pandas.CSVDataset, filepath: a, load_args: {delimeter: ;}}",
            "load_args: pandas' read_csv has no delimeter; did you mean delimiter?",
        ),
        (
            "{type: pandas.CSVDataset, filepath: a, save_args: {idnex: false}}",
            "save_args: pandas' to_csv has no idnex; did you mean index?",
        ),
        (
            "{type: pandas.CSVDataset, filepath: a, delimiter: ;}",
            "pandas.CSVDataset has no delimiter; put it under load_args",
        ),
    ],
)
def test_a_misspelt_option_of_a_catalog_entry_is_refused(tmp_path, entry, said):
    told = f"catalog entry raw_texts in conf/local: {said}"
    assert option_faults(tmp_path, entry) == told


@pytest.mark.parametrize(
    "entry",
    [
        "{type: flatout.datasets.TextFiles, filepath: a.csv, delimiter: ;}",
        "{type: pandas.CSVDataset, filepath: a, load_args: {sep: ;}, versioned: true}",
        # Those hand on what they do not know.
        "{type: pandas.ParquetDataset, filepath: a, load_args: {some_option: 1}}",
        "{type: no.such.Type, a: 1}",  # Kedro's to say
        "{filepath: a}",
    ],
)
def test_options_that_a_type_has_pass(tmp_path, entry):
    assert option_faults(tmp_path, entry) == ""


def test_entries_that_a_run_does_not_use_are_left_alone(tmp_path):
    entry = "{type: pandas.CSVDataset, filepath: a, delimeter: ;}"
    assert option_faults(tmp_path, entry, ("model",)) == ""
