"""Hooks around real runs: what is refused, what is set, what a kill leaves."""

from __future__ import annotations

import os
import shutil

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.pipeline import Node, Pipeline

from flatout.engine.settings import SettingsError
from flatout.hooks import EnvironmentHooks, ParameterHooks
from tests.conftest import PROJECT

RUNNERS = ("SequentialRunner", "ParallelRunner", "ThreadRunner")


def identity(x):
    return x


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("node", ["train_model", "run_trials", "split_rows"])
def test_only_nodes_that_start_processes_need_the_sequential_runner(runner, node):
    pipeline = Pipeline([Node(identity, "a", "b", name=node)])
    run_params = {"runner": f"<kedro.runner.{runner} object at 0x7f>"}
    check = ParameterHooks().before_pipeline_run
    if runner == "SequentialRunner" or node == "split_rows":
        check(run_params, pipeline)
    else:
        with pytest.raises(SettingsError, match=f"{node} cannot run in a Parallel"):
            check(run_params, pipeline)


def test_a_store_of_null_is_the_file_of_conf_base(tmp_path):
    bootstrap_project(PROJECT)
    conf = shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    (conf / "null").mkdir()
    text = "server:\n  mlflow_tracking_uri: null\n"
    (conf / "null/mlflow.yml").write_text(text)
    context = KedroSession.create(
        PROJECT,
        env="null",
        conf_source=conf,
        runtime_params={"data_dir": str(tmp_path)},
    ).load_context()
    store = f"sqlite:///{tmp_path}/mlflow.db"
    assert context.mlflow.server.mlflow_tracking_uri == store


def test_environment_is_set_as_the_parameters_say(monkeypatch):
    bootstrap_project(PROJECT)
    for name in ("MKL_THREADING_LAYER", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "before")
    context = KedroSession.create(
        PROJECT, runtime_params={"runtime": {"threads": 3}}
    ).load_context()
    EnvironmentHooks().after_context_created(context)
    assert os.environ["MKL_THREADING_LAYER"] == "GNU"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
