"""The sweep pipeline from the command line: killed, resumed and tracked."""

import csv
import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from kedro.io import DatasetError
from mlflow import MlflowClient

from flatout import cli
from flatout.datasets import TunedParameters
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.pipelines.sweep import create_pipeline
from flatout.project.parameters.checks import check_run
from flatout.reports.tuned import best_text
from tests.conftest import kedro
from tests.pipelines.tokens import write_tokens
from tests.projects import interrupted, ran, runs_of

RATE, BATCH = "train.learning_rate", "train.global_batch_size"
GRID = f"sweep.grid.{RATE}=1e-3 1e-2,sweep.grid.{BATCH}=16"


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path, empty_store):
    data = write_tokens(tmp_path / "data")
    shutil.copy(empty_store, data / "mlflow.db")
    logs = data / "08_reporting" / "sweep_logs"
    asked = f"data_dir={data},runtime.threads=1,train.max_steps=3,{GRID}"
    arguments = ["run", "--env=test", "--pipelines=sweep", f"--params={asked}"]
    answers = lambda: list(logs.glob("*/answer.json"))  # noqa: E731
    killed = interrupted(arguments, data / "log", answers, signal.SIGKILL)
    assert killed == -signal.SIGKILL
    [first] = answers()
    answer, written_ns = json.loads(first.read_text()), first.stat().st_mtime_ns

    said = ran(*arguments)
    assert first.stat().st_mtime_ns == written_ns
    assert len(answers()) == 2
    assert not list(logs.glob("*/training")), "weights of trials are not kept"
    with (data / "08_reporting/sweep_trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row.values())[:3] for row in rows] == [
        ("001", "0.001", "16"),
        ("002", "0.01", "16"),
    ]
    assert {(row["status"], row["note"], row["steps"]) for row in rows} == {
        ("ok", "", "3")
    }
    assert float(rows[0]["validation_loss"]) == answer["figures"]["validation_loss"]
    assert len({row["validation_loss"] for row in rows}) == 2

    best = json.loads((data / "08_reporting/sweep_best.json").read_text())
    lowest = min(rows, key=lambda row: float(row["validation_loss"]))
    assert best["trial_id"] == lowest["trial_id"]
    assert best["settings"] == {RATE: float(lowest[RATE]), BATCH: int(lowest[BATCH])}
    assert best["command"] == "kedro run --pipelines=train --env=best"
    assert best["command"] in " ".join(said.split())
    written = yaml.safe_load((data / "best/parameters.yml").read_text())
    assert written["train"] == {
        "learning_rate": float(lowest[RATE]),
        "global_batch_size": int(lowest[BATCH]),
    }
    assert written["best"]["trial_id"] == best["trial_id"]
    assert_nested_runs(data, best)


def assert_nested_runs(data: Path, best: dict) -> None:
    """Check for one finished and one killed parent run. The first has two trials."""
    client = MlflowClient(f"sqlite:///{data}/mlflow.db")
    nested = [run for run in runs_of(data) if "mlflow.parentRunId" in run.data.tags]
    [parent_id] = {run.data.tags["mlflow.parentRunId"] for run in nested}
    parent = client.get_run(parent_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_validation_loss"] == best["validation_loss"]
    found = {(run.data.params[RATE], run.data.params[BATCH]) for run in nested}
    assert found == {("0.001", "16"), ("0.01", "16")}
    losses = [run.data.metrics["validation_loss"] for run in nested]
    assert min(losses) == best["validation_loss"]
    curves = [
        client.get_metric_history(run.info.run_id, "train_loss") for run in nested
    ]
    assert all(curves), "a trial's run has the curves of its training"
    lasted = [run.info.end_time - run.info.start_time for run in nested]
    assert all(0 < ms < 600_000 for ms in lasted)


def test_the_winner_is_an_environment_over_that_of_the_sweep(tmp_path):
    best = {
        "trial_id": "003",
        "settings": {RATE: 0.01, "model.config.hidden_size": 64},
        "chosen_by": "validation_loss",
        "validation_loss": 0.25,
    }
    entry = TunedParameters(
        filepath=str(tmp_path / "conf/best/parameters.yml"),
        measured_in={"environment": "images"},
    )
    with pytest.raises(DatasetError, match="--pipelines=sweep writes it"):
        entry.load()
    entry.save(best_text(best))
    assert yaml.safe_load(entry.load()) == {
        "train": {"learning_rate": 0.01},
        "model": {"config": {"hidden_size": 64}},
        "best": {
            "trial_id": "003",
            "chosen_by": "validation_loss",
            "validation_loss": 0.25,
            "environment": "images",
        },
    }


@pytest.mark.process
def test_a_sweep_without_a_winner_says_so(tmp_path, empty_store):
    data = write_tokens(tmp_path / "data")
    shutil.copy(empty_store, data)
    asked = f"data_dir={data},runtime.threads=1,sweep.trial_timeout_s=0.01,{GRID}"
    done = kedro("run", "--env=test", "--pipelines=sweep", f"--params={asked}")
    assert done.returncode == 1, done.stdout
    assert "no trial of the sweep (2)" in " ".join(done.stdout.split())
    assert not (data / "best").exists()


def test_the_command_that_wrote_the_winner_names_the_pipeline_that_does():
    done = CliRunner().invoke(cli.flatout, ["best", "--data-dir=data"])
    assert done.exit_code == 2
    assert "kedro run --pipelines=sweep writes conf/best" in done.output


def test_names_that_are_no_settings_are_refused_before_anything_runs():
    settings = parse_settings({"sweep": {"grid": {"train.learning_rat": [1]}}})
    run_params = {"runner": "SequentialRunner"}
    with pytest.raises(SettingsError, match=f"did you mean {RATE}"):
        check_run(settings, run_params, create_pipeline())
    with pytest.raises(SettingsError, match="run_sweep cannot run in a Parallel"):
        check_run(parse_settings({}), {"runner": "ParallelRunner"}, create_pipeline())
