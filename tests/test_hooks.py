"""Hooks around real runs: what is refused, what is set, what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.pipeline import Node, Pipeline
from mlflow import MlflowClient

from flatout.engine.settings import SettingsError
from flatout.hooks import EnvironmentHooks, ParameterHooks
from tests.conftest import PROJECT, kedro

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


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_a_killed_training_goes_on_in_the_same_mlflow_run(tmp_path: Path):
    parameters = (
        f"data_dir={tmp_path},train.max_steps=60,train.epochs=10,"
        "train.checkpoint.every_steps=3"
    )
    command = ["run", "--env=test", f"--params={parameters}"]
    points = tmp_path / "08_reporting/train_metrics.jsonl"
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kedro", *command],
            cwd=PROJECT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: points.exists() and '"step": 8' in points.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("flatout").experiment_id
    [killed] = client.search_runs([experiment])
    assert killed.info.status == "KILLED"
    assert killed.data.tags["exit_reason"] == "interrupted"

    done = kedro(*command)
    assert done.returncode == 0, done.stdout
    [run] = client.search_runs([experiment])
    assert run.info.run_id == killed.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.tags["exit_reason"] == "finished"
    assert int(run.data.tags["resumed_from_step"]) >= 3
    assert {"token_key", "work_key", "guard"} <= set(run.data.tags)
    history = client.get_metric_history(run.info.run_id, "train_loss")
    times_logged = Counter(point.step for point in history)
    assert set(times_logged) == set(range(2, 61, 2))
    assert set(times_logged.values()) == {1}
