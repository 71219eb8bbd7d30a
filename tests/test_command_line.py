"""Unknown names on the command line and invalid YAML files lead to a one-line message
without a traceback."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, DatasetError

from flatout.cli import answers
from flatout.cli.groups import cli
from flatout.cli.looking import flatout
from flatout.engine.answers import gate
from flatout.project.command_line import (
    CommandError,
    check_environment,
    check_pipelines,
    plain_error,
)
from tests.conftest import kedro
from tests.engine.runs import make_job
from tests.engine.test_gate import BASE

ENVIRONMENTS = (
    "['arrays', 'base', 'bert_base', 'deeplog', 'elmo', 'final_run', 'first_try', "
    "'images', 'local', 'low_memory', 'qwen3', 'reproducible', 'slow', 'slow_loader', "
    "'test'"
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--env=slwo"), "--env: no environment slwo; did you mean slow?"),
        (
            ("flatout", "sync", "--env", "nope"),
            f"--env: no environment nope; valid: {ENVIRONMENTS}",
        ),
        (
            ("flatout", "sync", "--env", "tset"),
            "--env: no environment tset; did you mean test?",
        ),
        (
            ("run", "--pipelines=split,trian"),
            "--pipelines: no pipeline trian; did you mean train?",
        ),
        (
            ("run", "--env=test", "--pipelines=split", "--nodes=foo"),
            "Pipeline does not contain nodes named ['foo']",
        ),
        (
            ("run", "--env=test", "--pipeline=split", "--nodes=foo"),
            "Pipeline does not contain nodes named ['foo']",
        ),
        (
            ("run", "--env=test", "--pipelines=split", "--to-outputs=trainrows"),
            "Pipeline does not contain datasets named ['trainrows']",
        ),
        (
            ("run", "--env=test", "--pipelines=split", "--tags=mine"),
            "Pipeline contains no nodes after applying all provided filters",
        ),
        (
            ("flatout", "deadline", "log", "--hours=1", "--steps=0"),
            "Invalid value for '--steps': 0 is not in the range x>=1.",
        ),
    ],
)
def test_what_the_project_does_not_have(arguments, said):
    done = kedro(*arguments)
    assert done.returncode == 2
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"Error: {said}")
    assert "Traceback" not in done.stdout
    assert "deprecated" not in done.stdout  # from --pipeline


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "has no finished data"),
        (
            ",train.global_batchsize=8,tokenize.max_length=0",
            "2 parameters cannot be used; nothing was run.",
        ),
        (",model.name_or_path=/no/model", "there is no folder /no/model. Set it to a"),
        (",trian.epochs=3", "trian: unknown parameter; did you mean train?"),
        (",my_node.size=3", "my_node: unknown parameter, no node of this run reads it"),
    ],
)
def test_an_error_of_the_users_is_not_told_to_be_repeated(tmp_path, given, said):
    arguments = ("run", "--env=test", "--pipeline=train")
    done = kedro(*arguments, f"--params=data_dir={tmp_path}{given}")
    assert done.returncode in (2, 3)
    assert said in " ".join(done.stdout.partition("Error: ")[2].split())
    assert "No nodes ran" not in done.stdout
    assert done.returncode == 3 or not list(tmp_path.iterdir())


def test_a_command_that_is_gone_names_what_does_its_work():
    done = CliRunner().invoke(flatout, ["compare", "--steps", "40"])
    assert done.exit_code == 2
    assert "benchmark.mode=ladder" in done.output
    done = CliRunner().invoke(cli, ["mlflow", "ui"])
    assert done.exit_code == 2 and "kedro flatout ui shows the runs" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["init", "a.csv", "--yes"], "init --yes was removed in this version. init"),
        (["parameters", "--markdown=a.md"], "parameters --markdown was removed in"),
    ],
)
def test_an_option_that_is_gone_names_what_does_its_work(arguments, said):
    done = CliRunner().invoke(flatout, arguments)
    assert done.exit_code == 2
    assert f"Error: {said}" in done.output


def test_rows_shows_at_least_one_row():
    done = CliRunner().invoke(flatout, ["rows", "--step=1", "--most=-3"])
    assert done.exit_code == 2
    assert "-3 is not in the range x>=1" in done.output


def test_rows_tells_that_the_raw_data_are_others_now(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "context_of", lambda *_: SimpleNamespace(catalog=1))
    monkeypatch.setattr(answers, "training_job", lambda _: make_job(tmp_path))
    monkeypatch.setattr(answers, "loader_of", lambda _: SimpleNamespace(settings=2))
    monkeypatch.setattr(answers, "data_fault", lambda *given: f"changed: {given}")
    done = CliRunner().invoke(flatout, ["rows", "--step=1", "--most=1"])
    first, *_, last = done.output.splitlines()
    assert first.startswith("step 1: 16 rows")
    assert last == "Note: changed: (1, 2)"


def test_gate_refuses_another_number_of_steps_before_it_trains(tmp_path, monkeypatch):
    file = tmp_path / "gate.json"
    BASE.write(file)
    job = replace(make_job(tmp_path), data_key=BASE.tags["token_key"])
    monkeypatch.setattr(answers, "context_of", lambda *_: None)
    monkeypatch.setattr(answers, "training_job", lambda _: job)
    monkeypatch.setattr(gate, "run_job", lambda _: pytest.fail("it trained"))
    done = CliRunner().invoke(flatout, ["gate", "--steps=50", f"--baseline={file}"])
    assert done.exit_code == 2
    assert "like this run (then -> now): --steps: 100 -> 50. Set" in done.output


def test_environments_and_pipelines_that_there_are():
    for env in (None, "local", "base", "slow", "tuned"):
        check_environment(env)
    check_environment("prod", "settings.tar.gz")
    check_pipelines(["__default__", "split", "benchmark"])
    with pytest.raises(CommandError, match="no pipeline qwxyz; valid:"):
        check_pipelines(["qwxyz"])


@pytest.mark.process
def test_a_data_folder_that_is_not_there_is_not_made(tmp_path):
    missing = tmp_path / "dta"
    done = kedro("flatout", "sync", f"--data-dir={missing}")
    assert done.returncode == 2
    last = done.stdout.splitlines()[-1]
    assert last == f"Error: --data-dir: there is no folder {missing}"
    assert not missing.exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("raw_texts:\n  type: a\n filepath: b\n", "line 3"),
        ("raw_texts: {type: a\n", "line 2"),
        ("raw_texts:\n  type: a\n  type: b\n", "line 3"),
    ],
)
def test_a_slip_in_a_file_names_the_line(tmp_path, text, line):
    file = tmp_path / "base" / "catalog.yml"
    file.parent.mkdir()
    file.write_text(text)
    loader = OmegaConfigLoader(str(tmp_path), base_env="base", default_run_env="base")
    with pytest.raises(yaml.MarkedYAMLError) as caught:
        loader["catalog"]
    assert line in str(plain_error(caught.value))


@pytest.mark.parametrize(
    ("kind", "option", "near"),
    [
        ("flatout.datasets.TextFiles", "filepat", "did you mean filepath?"),
        ("flatout.datasets.TextFiles", "delimitr", "did you mean delimiter?"),
        ("pandas.CSVDataset", "load_arg", "did you mean load_args?"),
    ],
)
def test_a_misspelt_option_of_an_entry_is_one_sentence(kind, option, near):
    entry = {"type": kind, "filepath": "a.csv", option: "x"}
    with pytest.raises(DatasetError) as caught:
        DataCatalog.from_config({"mine": entry}).get("mine")
    said = str(plain_error(caught.value))
    assert said.startswith("catalog: mine: ") and "\n" not in said
    assert said.endswith(f"no option {option!r}: correct or remove it in conf/; {near}")


def test_what_only_a_traceback_explains():
    assert plain_error(ValueError("of somebody's node")) is None
    assert plain_error(ZeroDivisionError("division by zero")) is None
