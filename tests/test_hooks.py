"""Hooks in real runs: what they refuse, what they set, and what a killed run leaves."""

import os
import shlex

import pytest
from kedro.framework.cli.project import run
from kedro.framework.project import pipelines
from kedro.framework.startup import bootstrap_project
from kedro.pipeline import Node, Pipeline

from flatout.cli.looking import sync
from flatout.engine.parameters import DistributedSettings, SettingsError, parse_settings
from flatout.project.hooks.run import Run
from flatout.project.mlflow_options import login, mlflow_options
from flatout.project.parameters.checks import check_machine, check_run
from flatout.settings import HOOKS
from tests.conftest import PROJECT
from tests.projects import context_of, copied_conf

RUNNERS = ("SequentialRunner", "ParallelRunner", "ThreadRunner")


def identity(x):
    return x


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("node", ["train_model", "run_trials", "split_rows"])
def test_only_nodes_that_start_processes_need_the_sequential_runner(runner, node):
    pipeline = Pipeline([Node(identity, "a", "b", name=node)])
    run_params = {"runner": f"<kedro.runner.{runner} object at 0x7f>"}
    settings = parse_settings({})
    if runner == "SequentialRunner" or node == "split_rows":
        check_run(settings, run_params, pipeline)
    else:
        with pytest.raises(SettingsError, match=f"{node} cannot run in a Parallel"):
            check_run(settings, run_params, pipeline)


@pytest.mark.parametrize("mode", ["tune", "ladder", "grid"])
def test_only_a_grid_may_change_the_global_batch(mode):
    asked = {"mode": mode, "free_global_batch": True}
    settings, run_params = parse_settings({"benchmark": asked}), {"runner": ""}
    check_run(settings, run_params, Pipeline([Node(identity, "a", "b", name="train")]))
    benchmark = Pipeline([Node(identity, "a", "b", name="run_trials")])
    if mode == "grid":
        check_run(settings, run_params, benchmark)
    else:
        with pytest.raises(SettingsError, match="set mode grid, or false"):
            check_run(settings, run_params, benchmark)


@pytest.mark.parametrize("read", ["params:own", "params:own.size", "parameters"])
def test_parameters_of_ones_own_nodes_pass_where_a_node_reads_them(read):
    settings = parse_settings({"own": {"size": 3}})
    given = {"own": {"size": 4}, "train": {"epochs": 1}}
    run_params = {"runner": "SequentialRunner", "runtime_params": given}
    check_run(settings, run_params, Pipeline([Node(identity, read, "b")]))
    with pytest.raises(SettingsError, match="own: unknown parameter, no node of this"):
        check_run(settings, run_params, Pipeline([Node(identity, "a", "b")]))


def context_with(folder, mlflow, credentials="", **parameters):
    """Return the context of an environment with these files."""
    conf = copied_conf(folder)
    (conf / "own").mkdir()
    (conf / "own/mlflow.yml").write_text(mlflow)
    (conf / "own/credentials.yml").write_text(credentials)
    return context_of("own", conf_source=conf, runtime_params=parameters)


def test_a_store_of_null_is_the_file_of_conf_base(tmp_path):
    text = "server:\n  mlflow_tracking_uri: null\n"
    context = context_with(tmp_path, text, data_dir=str(tmp_path))
    store = f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow_options(context).store == store


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "params:\n    long_params_strategy: fail",
            "long_params_strategy: Extra inputs",
        ),
        (
            "experiment:\n    name: [1]",
            "experiment.name: Input should be a valid string",
        ),
    ],
)
def test_a_key_of_mlflow_that_is_not_read_is_refused(tmp_path, line, said):
    with pytest.raises(SettingsError, match=said):
        context_with(tmp_path, f"tracking:\n  {line}\n")


def test_a_login_is_read_from_the_credentials(tmp_path):
    text = "mine: {MLFLOW_TRACKING_USERNAME: me}\n"
    context = context_with(tmp_path, "server: {credentials: mine}\n", text)
    found = login(context, mlflow_options(context))
    assert found == {"MLFLOW_TRACKING_USERNAME": "me"}


def test_suggested_commands_have_the_options_of_the_run(tmp_path):
    """Kedro's and flatout's own command lines parse the suggested options."""
    conf = str(copied_conf(tmp_path / "my own"))
    data = str(tmp_path / "my data")
    plain, other = Run(), Run()
    plain.begin(context_of())
    assert (plain.run_options, plain.data_option) == ("", "")
    split = {"label_column": None, "drop_rows": [3]}
    own = {"data_dir": data, "images": {"size": 16}, "split": split}
    long = {"split": {**split, "label_columns": ["a", "b"]}, "train": {"epochs": 2}}
    given = {"runtime_params": own | long}
    other.begin(context_of("test", conf_source=conf, **given))
    read = run.make_context("run", shlex.split(other.run_options)).params
    assert (read["env"], read["conf_source"]) == ("test", conf)
    assert read["params"] == own
    read = sync.make_context("sync", shlex.split(other.data_option)).params
    assert read["data_dir"] == data


SPLIT = Node(identity, "raw", "tokens", name="tokenize_rows")
TRAIN = Node(identity, "tokens", "model", name="train_model")
REPORT = Node(identity, "model", "page", name="report")
MACHINE_1 = DistributedSettings(
    num_machines=2, machine_rank=1, rendezvous_endpoint="node0:29500"
)


def test_a_machine_other_than_the_first_only_trains():
    check_machine(MACHINE_1, Pipeline([TRAIN, REPORT]))
    check_machine(DistributedSettings(), Pipeline([SPLIT, TRAIN]))
    for nodes in ([SPLIT, TRAIN], [SPLIT]):
        with pytest.raises(SettingsError) as refused:
            check_machine(MACHINE_1, Pipeline(nodes))
        assert "machine_rank=1: machines other than 0 only" in str(refused.value)
        assert "tokenize_rows would write" in str(refused.value)
        assert "Type kedro run --pipelines=train with" in str(refused.value)


def test_a_command_that_srun_starts_several_times_is_refused(monkeypatch):
    pipeline = Pipeline([TRAIN])
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    check_machine(MACHINE_1, pipeline)  # one task per machine
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(SettingsError, match=r"srun started .* 8 times.*slurm\.sh"):
        check_machine(MACHINE_1, pipeline)
    monkeypatch.setenv("RANK", "0")  # of a launcher that maps tasks to ranks
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_machine(DistributedSettings(), pipeline)


def test_environment_is_set_as_the_parameters_say(monkeypatch):
    for name in ("MKL_THREADING_LAYER", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "before")
    context_of(runtime_params={"runtime": {"threads": 3}})
    assert os.environ["MKL_THREADING_LAYER"] == "GNU"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"


def test_a_default_run_makes_fewer_than_200_hook_calls():
    bootstrap_project(PROJECT)
    pipelines.set_requested(None)
    nodes = pipelines["__default__"].nodes
    times = {
        "dataset_loaded": sum(len(node.inputs) for node in nodes),
        "dataset_saved": sum(len(node.outputs) for node in nodes),
        "node_run": len(nodes),
    }
    names = [
        n for hooks in HOOKS for n in dir(hooks) if n.startswith(("before", "after"))
    ]
    calls = [times.get(name.partition("_")[2], 1) for name in names]
    assert len(nodes) == 9 and sum(calls) < 200
    assert [type(h).__name__ for h in reversed(HOOKS)] == [
        *("ClockHooks", "SettingsHooks", "DataHooks", "TrackingHooks")
    ]
