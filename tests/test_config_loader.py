"""The order in which the folders of conf/ override one another."""

import shutil

import pytest
import yaml

from flatout.engine.machine.environment import training_environment
from flatout.engine.parameters import RuntimeSettings, parse_settings
from flatout.project.config_loader import (
    SETTINGS_OF_TRAINING,
    SITUATIONS,
    NotTunedError,
    ProjectConfigLoader,
)
from flatout.settings import CONFIG_LOADER_ARGS
from tests.conftest import PROJECT, kedro
from tests.projects import context_of, copied_conf


@pytest.fixture
def conf(tmp_path):
    """The project's configuration, with a user's data, model and tracking server in
    local."""
    folder = copied_conf(tmp_path)
    write(
        folder / "local/catalog.yml",
        {"raw_texts": {"type": "pandas.CSVDataset", "filepath": "mine.csv"}},
    )
    write(
        folder / "local/parameters.yml",
        {"model": {"name_or_path": "mine"}, "train": {"epochs": 7, "log_every": 3}},
    )
    write(folder / "local/credentials.yml", {"server": {"token": "t"}})
    write(
        folder / "tuned/parameters.yml",
        {"train": {"log_every": 5, "token_budget": 640}, "tuned": {"device": "x"}},
    )
    write(folder / "best/parameters.yml", {"train": {"learning_rate": 0.1}})
    return folder


def write(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(content))


def loader(conf, env, **parameters):
    return ProjectConfigLoader(
        str(conf), env=env, runtime_params=parameters, **CONFIG_LOADER_ARGS
    )


def test_the_benchmark_writes_beside_the_configuration_in_use(conf):
    found = loader(conf, None)["catalog"]["tuned_parameters"]
    assert found["filepath"] == str(conf / "tuned/parameters.yml")
    own = loader(PROJECT / "conf", None)["catalog"]["tuned_parameters"]
    assert own["filepath"] == str(PROJECT / "conf/tuned/parameters.yml")


@pytest.mark.parametrize("env", [None, "local", "test", "elmo", *SETTINGS_OF_TRAINING])
def test_the_users_data_and_model_are_those_of_local(conf, env):
    found = loader(conf, env)
    assert found["catalog"]["raw_texts"]["filepath"] == "mine.csv"
    assert "{split}_tokens" in found["catalog"]
    assert found["parameters"]["model"]["name_or_path"] == "mine"
    if env not in ("test", "elmo"):
        assert found["parameters"]["train"]["epochs"] == 7
    assert found["credentials"] == {"server": {"token": "t"}}
    assert found["mlflow"]["tracking"]["experiment"]["name"] == "flatout"


@pytest.mark.parametrize("env", ["tuned", "best"])
def test_what_was_measured_lies_over_the_environment_of_its_measurement(conf, env):
    measured = {"train": {"log_every": 5}, env: {"environment": "images"}}
    write(conf / env / "parameters.yml", measured)
    found = loader(conf, env)
    assert found["catalog"]["raw_images"]["type"] == "flatout.datasets.Digits"
    assert found["parameters"]["train"]["rows"] == "images"
    assert found["parameters"]["train"]["log_every"] == 5
    assert "epochs" not in found.layers()[f"conf/{env}"]["train"]
    names = ["conf/base", "conf/local", "conf/images", f"conf/{env}"]
    assert list(found.layers())[:4] == names
    measured_again = found["catalog"]["tuned_parameters"]["measured_in"]
    assert measured_again["environment"] == "images"


@pytest.mark.parametrize(
    ("env", "environment"), [("images", "images"), ("low_memory", None), (None, None)]
)
def test_the_benchmark_notes_the_environment_of_its_run(conf, env, environment):
    found = loader(conf, env, train={"epochs": 2})["catalog"]["tuned_parameters"]
    assert found["measured_in"] == {"environment": environment}


@pytest.mark.parametrize("env", SITUATIONS)
def test_a_situation_changes_execution_and_is_explained_in_three_lines(env):
    """Batches, learning rates and the model are unchanged. Only `first_try` has fewer
    steps."""
    folder = PROJECT / "conf" / env
    lines = (folder / "parameters.yml").read_text().splitlines()
    assert [line.startswith("# ") for line in lines[:4]] == [True] * 3 + [False]
    given = yaml.safe_load((folder / "parameters.yml").read_text())
    parse_settings({"model": {"config": {"model_type": "bert"}}, **given})
    assert not given.keys() & {"model", "split", "tokenize"}
    execution = {"loader", "checkpoint", "distributed", "on_oom", "cuda_graphs"}
    execution |= {"gradient_checkpointing"}
    if env == "first_try":
        execution |= {"max_steps", "log_every", "resume"}
    assert given.get("train", {}).keys() <= execution


@pytest.mark.parametrize("deterministic", [True, False])
def test_cublas_is_told_to_be_deterministic(deterministic):
    wanted = training_environment(RuntimeSettings(deterministic=deterministic))
    expected = ":4096:8" if deterministic else None
    assert wanted.get("CUBLAS_WORKSPACE_CONFIG") == expected


def test_what_the_environment_says_wins_over_local(conf):
    tuned = loader(conf, "tuned")["parameters"]
    assert (tuned["train"]["log_every"], tuned["train"]["token_budget"]) == (5, 640)
    assert tuned["tuned"] == {"device": "x"}
    assert loader(conf, "slow")["parameters"]["train"]["log_every"] == 1
    assert loader(conf, None)["parameters"]["train"]["log_every"] == 3


def test_the_command_line_wins_over_all(conf):
    given = loader(conf, "tuned", train={"log_every": 9})["parameters"]["train"]
    assert (given["log_every"], given["epochs"], given["token_budget"]) == (9, 7, 640)


@pytest.mark.parametrize("place", ["file", "command line"])
def test_data_dir_and_paths_move_the_catalog(conf, place):
    moved = {"data_dir": "/else", "images": {"path": "photos"}, "corpus": {"rows": 50}}
    if place == "file":
        write(conf / "local/parameters.yml", moved)
    found = loader(conf, "images", **(moved if place == "command line" else {}))
    tokens = found["catalog"]["{split}_tokens"]["filepath"]
    assert tokens == "/else/05_model_input/{split}_tokens"
    assert found["catalog"]["raw_images"]["path"] == "photos"
    assert found["parameters"]["paths"]["checkpoints"] == "/else/06_models/checkpoints"
    (conf / "local/catalog.yml").unlink()
    again = loader(conf, None, **(moved if place == "command line" else {}))
    assert again["catalog"]["raw_texts"]["rows"] == 50


def test_environments_set_parameters_only():
    folders = [f for f in (PROJECT / "conf").iterdir() if f.is_dir()]
    others = [f for f in folders if f.name not in ("base", "local", "tuned", "best")]
    assert {file.name for f in others for file in f.iterdir()} == {"parameters.yml"}


def test_settings_are_parsed_once_and_what_is_given_out_is_the_askers_own(conf):
    found = loader(conf, "tuned")
    found["parameters"]["train"]["log_every"] = 99
    (conf / "tuned/parameters.yml").write_text("train: {log_every: 6}")
    assert found["parameters"]["train"]["log_every"] == 5
    found.runtime_params = {"train": {"log_every": 9}}
    assert found["parameters"]["train"]["log_every"] == 9
    assert loader(conf, "tuned")["parameters"]["train"]["log_every"] == 6


def test_what_is_set_by_hand_counts(conf):
    found = loader(conf, None)
    assert found["catalog"]["raw_texts"]["filepath"] == "mine.csv"
    found["catalog"] = {"raw_texts": {}}
    assert found["catalog"] == {"raw_texts": {}}


def test_without_a_local_folder_the_measured_environment_lies_under_tuned(conf):
    shutil.rmtree(conf / "local")
    tuned = {"train": {"token_budget": 640}, "tuned": {"environment": "arrays"}}
    write(conf / "tuned/parameters.yml", tuned)
    found = loader(conf, "tuned")["parameters"]
    assert found["train"]["rows"] == "arrays"
    assert found["train"]["token_budget"] == 640


@pytest.mark.parametrize("kind", ["gztar", "tar", "zip"])
def test_an_archive_has_the_same_parameters_as_its_folder(conf, tmp_path, kind):
    shutil.rmtree(conf / "local")
    archive = shutil.make_archive(tmp_path / "packed", kind, tmp_path, "conf")
    for env in ("test", "arrays"):
        corpus = [loader(c, env)["catalog"]["raw_texts"] for c in (conf, archive)]
        assert corpus[0]["labels"] > 1
        assert corpus[0] == corpus[1]


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a file"])
def test_tuned_before_a_benchmark_has_written_it(conf, left):
    folder = conf / "tuned"
    shutil.rmtree(folder)
    if left == "an empty folder":
        folder.mkdir()
    elif left == "a file":
        folder.write_text("")
    with pytest.raises(NotTunedError) as caught:
        loader(conf, "tuned")
    assert str(caught.value) == (
        f"{folder} has no parameters yet: kedro run --pipelines=benchmark writes them"
    )


def test_a_run_says_so_in_a_line(conf):
    shutil.rmtree(conf / "tuned")
    done = kedro("run", "--env=tuned", f"--conf-source={conf}")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
    assert done.stdout.splitlines()[-1] == (
        f"Error: {conf}/tuned has no parameters yet: kedro run --pipelines=benchmark "
        "writes them"
    )


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_the_files_that_a_parameter_names_are_also_predicted(kind, tmp_path):
    """The predict command that a run suggests names them with this parameter."""
    options = {"runtime_params": {kind: {"path": str(tmp_path)}}}
    catalog = context_of(kind, **options).catalog
    assert catalog.load(f"raw_{kind}") == catalog.load(f"predict_{kind}") == tmp_path
