"""The outbox and its thread, against real SQLite stores and a closed port."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sqlite3
import threading
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag
from mlflow.models import Model
from transformers import AutoTokenizer

from flatout import tracking
from flatout.tracking import facts, models, outcomes
from flatout.tracking.outbox import Outbox
from flatout.tracking.sending import send
from flatout.tracking.store import process_tags
from tests.engine.families import task_model
from tests.pipelines.tokens import write_tokens


def record(uri: str, tmp_path: Path, **changes) -> tracking.RunRecord:
    return tracking.RunRecord(
        tracking_uri=uri,
        experiment="flatout",
        name="bert_cpu_b8",
        artifact_location=str(tmp_path / "artifacts"),
        **{"tags": {"exit_reason": "running"}, **changes},
    )


def append(points: Path, *steps: int, **metrics: float) -> None:
    """Lines as the engine writes them."""
    points.parent.mkdir(parents=True, exist_ok=True)
    with points.open("a") as file:
        for step in steps:
            values = metrics or {"train_loss": 1 / step}
            line = {"step": step, "time_s": 1_700_000_000 + step, "metrics": values}
            file.write(json.dumps(line) + "\n")


def history(uri: str, run_id: str, metric: str = "train_loss") -> list[tuple]:
    found = MlflowClient(uri).get_metric_history(run_id, metric)
    return sorted((m.step, m.value, m.timestamp) for m in found)


@pytest.fixture
def points(tmp_path: Path) -> Path:
    return tmp_path / "reporting" / "train_metrics.jsonl"


@pytest.fixture
def closed_port() -> str:
    """URI of a server that is not there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def run_to_end(outbox: tracking.Outbox, status: str = "FINISHED") -> bool:
    forwarder = tracking.Forwarder(outbox)
    forwarder.start()
    return forwarder.finish(status, outbox.record.start_ms + 5000)


def test_a_run_reaches_the_store_whole(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 2, 4, train_loss=0.5, learning_rate=1e-3)
    outbox.record.params["train.epochs"] = "3"
    outbox.record.metrics["test_accuracy"] = 0.75
    report = points.with_name("train_report.json")
    report.write_text("{}")

    assert run_to_end(outbox)

    run = MlflowClient(store).get_run(outbox.record.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "bert_cpu_b8"
    assert run.info.end_time - run.info.start_time == 5000
    assert run.data.params == {"train.epochs": "3"}
    assert run.data.metrics["test_accuracy"] == 0.75
    assert run.data.tags["exit_reason"] == "running"
    assert history(store, run.info.run_id) == [
        (2, 0.5, 1_700_000_002_000),
        (4, 0.5, 1_700_000_004_000),
    ]
    assert (tmp_path / "artifacts" / run.info.run_id / "artifacts").exists()


def test_points_arrive_while_the_run_goes_on(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    forwarder = tracking.Forwarder(outbox)
    forwarder.start()
    append(points, 1)
    deadline = time.monotonic() + 20
    while outbox.record.sent_bytes == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [step for step, *_ in history(store, outbox.record.run_id)] == [1]
    assert forwarder.finish("FINISHED", 0)


def test_more_points_than_one_request_takes(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, *range(1, 2502))
    assert run_to_end(outbox)
    assert len(history(store, outbox.record.run_id)) == 2501


def test_a_training_that_starts_anew_in_its_run_repeats_and_loses_no_point(
    store, tmp_path, points
):
    """It empties the file, which may be longer than before at the next look."""
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    client = MlflowClient(store)
    append(points, 1, 2, train_loss=0.5)
    run_id = send(outbox, client)
    points.write_text("")
    append(points, 1, 2, 3, 4, train_loss=0.25)
    append(points, 4, validation_loss=0.75)
    send(Outbox.load(points), client)
    assert [(s, loss) for s, loss, _ in history(store, run_id)] == [
        *((1, 0.5), (2, 0.5)),
        *((3, 0.25), (4, 0.25)),
    ]
    assert [s for s, *_ in history(store, run_id, "validation_loss")] == [4]


def test_a_half_written_line_waits_and_a_broken_one_is_passed(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 1)
    with points.open("a") as file:
        file.write('not json\n{"event": "evaluated"}\n{"step": 2, "metr')
    client = MlflowClient(store)
    run_id = send(outbox, client)
    with points.open("a") as file:
        file.write('ics": {"train_loss": 0.25}, "time_s": 1}\n')
    send(outbox, client)
    assert [step for step, *_ in history(store, run_id)] == [1, 2]


def test_nothing_is_sent_twice_by_a_run_that_goes_on(store, tmp_path, points):
    first = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 1, 2)
    run_to_end(first, "KILLED")
    append(points, 3)  # written before the kill, not sent
    # Resumed from the checkpoint of step 1: steps 2 and 3 are trained and logged again,
    # the evaluation at step 3 is new.
    second = tracking.begin(points, record(store, tmp_path), goes_on=True)
    append(points, 2, 3)
    append(points, 3, validation_loss=0.5)
    client = MlflowClient(store)
    assert client.get_run(first.record.run_id).info.status == "KILLED"
    assert send(second, client) == first.record.run_id
    assert client.get_run(first.record.run_id).info.status == "RUNNING"
    append(points, 4)
    assert run_to_end(second)
    run_id = second.record.run_id
    assert run_id == first.record.run_id
    assert [step for step, *_ in history(store, run_id)] == [1, 2, 3, 4]
    assert [step for step, *_ in history(store, run_id, "validation_loss")] == [3]


@pytest.mark.parametrize("lost", ["moved", "emptied", "deleted there"])
def test_a_run_goes_on_whole_where_the_store_does_not_know_it(
    store, empty_store, tmp_path, points, lost
):
    first = tracking.begin(points, record(store, tmp_path), goes_on=False)
    first.record.params["train.epochs"] = "3"
    append(points, 1, 2)
    run_to_end(first, "KILLED")
    if lost == "moved":
        store = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'other.db')}"
    elif lost == "emptied":
        shutil.copy(empty_store, tmp_path / "mlflow.db")
    else:
        MlflowClient(store).delete_run(first.record.run_id)
    second = tracking.begin(points, record(store, tmp_path), goes_on=True)
    append(points, 2, 3)
    assert run_to_end(second)
    run = MlflowClient(store).get_run(second.record.run_id)
    assert run.info.run_id != first.record.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.epochs": "3"}
    assert [step for step, *_ in history(store, run.info.run_id)] == [1, 2, 3]


def test_what_auto_came_to_is_known_while_the_run_goes_on(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    points.parent.mkdir()
    settled = {"strategy": "packed", "token_budget": 512, "parameters": 7}
    line = {"step": 0, "time_s": 1.0, "metrics": {}, "settled": settled}
    points.write_text(json.dumps(line) + "\n")
    client = MlflowClient(store)
    run_id = send(outbox, client)
    tags = client.get_run(run_id).data.tags
    assert (tags["strategy"], tags["token_budget"]) == ("packed", "512")
    assert "parameters" not in tags
    outbox.record.tags["token_budget"] = "256"  # the report's: memory ran out
    send(outbox, client)
    assert client.get_run(run_id).data.tags["token_budget"] == "256"


def test_points_of_a_step_that_was_sent_already(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    client = MlflowClient(store)
    append(points, 8)
    run_id = send(outbox, client)
    append(points, 8, validation_loss=0.5)
    send(outbox, client)
    assert [step for step, *_ in history(store, run_id, "validation_loss")] == [8]


def test_a_finished_run_is_not_gone_on_with(store, tmp_path, points):
    first = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 1)
    run_to_end(first)
    second = tracking.begin(points, record(store, tmp_path), goes_on=True)
    assert not points.exists()
    append(points, 1)
    assert run_to_end(second)
    assert second.record.run_id != first.record.run_id


@pytest.mark.timeout(60)
def test_a_dead_server_costs_seconds_and_no_point(store, tmp_path, points, closed_port):
    tracking.prepare(closed_port)
    outbox = tracking.begin(points, record(closed_port, tmp_path), goes_on=False)
    append(points, 1, 2)
    assert not run_to_end(outbox)
    assert "not sent" in tracking.sync(points)[0]

    # The next run sets it aside; a sync sends both when the store is there.
    later = tracking.begin(points, record(closed_port, tmp_path), goes_on=False)
    append(points, 7)
    assert not run_to_end(later)
    for file in points.parent.rglob("*.run.json"):
        file.write_text(file.read_text().replace(closed_port, store))
    lines = tracking.sync(points)
    assert len(lines) == 2
    runs = [line.rsplit(" ", 1)[1] for line in lines]
    assert [[s for s, *_ in history(store, run)] for run in runs] == [[1, 2], [7]]
    assert tracking.sync(points) == []


def test_a_delivered_run_is_sent_to_another_store_once(
    store, empty_store, closed_port, tmp_path, points
):
    (there := tmp_path / "there").mkdir()
    other = f"sqlite:///{shutil.copy(empty_store, there / 'other.db')}"
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 1, 2)
    assert run_to_end(outbox)
    first = outbox.record.run_id
    assert tracking.sync(points) == tracking.sync(points, store) == []

    tracking.prepare(closed_port)  # else MLflow waits for minutes
    [line] = tracking.sync(points, closed_port)
    assert line.startswith(f"bert_cpu_b8: not sent to {closed_port} (")
    assert tracking.sync(points) == []  # its own store has it still

    [line] = tracking.sync(points, other)
    said, run_id = line.rsplit(" ", 1)
    assert said == f"bert_cpu_b8: sent to {other} as run"
    assert history(other, run_id) == history(store, first)
    found = MlflowClient(other).get_run(run_id).info
    assert found.status == "FINISHED"
    assert found.artifact_uri == str(there / "mlartifacts" / run_id / "artifacts")
    assert tracking.sync(points, other) == tracking.sync(points, store) == []


@pytest.mark.timeout(60)
def test_a_locked_store_costs_seconds_and_no_point(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, 1)
    lock = sqlite3.connect(store.removeprefix("sqlite:///"))
    lock.execute("BEGIN EXCLUSIVE")
    forwarder = tracking.Forwarder(outbox)
    forwarder.start()
    assert not forwarder.finish("FINISHED", 0, limit_s=2)
    lock.rollback()
    lock.close()


def test_the_load_of_the_machine_is_sent_beside_the_points(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    forwarder = tracking.Forwarder(outbox, system_metrics=True)
    forwarder.start()
    forwarder.wait_until_tried(20)
    assert forwarder.flush()
    assert forwarder.finish("FINISHED", 0)
    load = history(store, outbox.record.run_id, "system/cpu_utilization_percentage")
    assert [step for step, *_ in load] == [1, 2]
    assert all(0 <= share <= 100 for _, share, _ in load)


def test_a_store_that_is_held_is_opened_when_it_is_waited_for(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    asked = []

    def connect():
        asked.append(threading.current_thread().name)
        return MlflowClient(store)

    forwarder = tracking.Forwarder(outbox, connect)
    forwarder.start(held=True)
    forwarder.activate_run()
    assert asked == []
    forwarder.wait_until_tried(20)
    assert asked == ["flatout-tracking"]
    assert outbox.record.run_id
    assert forwarder.finish("FINISHED", 0)


def test_trials_are_nested_runs(store, tmp_path, points):
    table = pd.DataFrame(
        {
            "trial_id": ["a1", "b2"],
            "status": ["ok", "oom"],
            "samples_per_s": [120.5, float("nan")],
            "strategy": ["packed", "fixed"],
            "kind": ["end_to_end", "end_to_end"],
            "label": ["", "TF32, again"],
            "bucket_mib": [25, 25],
            "elapsed_s": [9.5, 61.25],
        }
    )
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    outbox.record.trials = outcomes.nested_runs(table)
    assert run_to_end(outbox)
    client = MlflowClient(store)
    parent = outbox.record.run_id
    experiment = client.get_run(parent).info.experiment_id
    nested = client.search_runs(
        [experiment], f"tags.mlflow.parentRunId = '{parent}'", order_by=["run_name"]
    )
    assert all(process_tags().items() <= run.data.tags.items() for run in nested)
    assert [(r.info.run_name, r.info.status, r.data.metrics) for r in nested] == [
        (
            "a1_end_to_end_packed",
            "FINISHED",
            {"samples_per_s": 120.5, "elapsed_s": 9.5},
        ),
        ("b2_TF32-again_fixed", "FAILED", {"elapsed_s": 61.25}),
    ]
    assert nested[1].data.params == {
        "trial_id": "b2",
        "status": "oom",
        "strategy": "fixed",
        "kind": "end_to_end",
        "label": "TF32, again",
        "bucket_mib": "25",
    }
    times = [(run.info.start_time, run.info.end_time) for run in nested]
    assert [end - start for start, end in times] == [9500, 61250]
    assert times[0][1] == times[1][0], "one after the other"


def test_a_trial_without_a_time_is_a_run_too():
    table = pd.DataFrame({"trial_id": ["a1", "b2"], "elapsed_s": [float("nan"), 2.0]})
    first, second = outcomes.nested_runs(table)
    assert first["start_ms"] == first["end_ms"] == second["start_ms"]
    assert second["end_ms"] - second["start_ms"] == 2000


@pytest.mark.parametrize(
    ("loss", "tokens", "wins"),
    [("0.4", "t1", True), ("0.6", "t1", False), ("0.1", "t2", False)],
)
def test_who_is_better_than_the_champion(loss, tokens, wins):
    def version(validation_loss, token_key):
        tags = {"validation_loss": validation_loss, "token_key": token_key}
        return ModelVersion(
            "flatout", "1", 0, tags=[ModelVersionTag(*t) for t in tags.items()]
        )

    assert models._is_better(version(loss, tokens), version("0.5", "t1")) is wins


def test_runs_of_dead_processes_are_closed(store, tmp_path):
    client = MlflowClient(store)
    experiment = client.create_experiment("flatout")
    tags = process_tags()
    dead = {**tags, "flatout.started_s": "1.00"}
    elsewhere = {**dead, "flatout.host": "another-machine"}
    runs = [
        client.create_run(experiment, tags=t).info.run_id
        for t in (tags, dead, elsewhere, {})
    ]
    assert tracking.close_stale_runs(client, "flatout") == 1
    statuses = [client.get_run(run).info.status for run in runs]
    assert statuses == ["RUNNING", "KILLED", "RUNNING", "RUNNING"]


def test_a_parameter_that_changed_keeps_its_first_value(store, tmp_path, points):
    first = tracking.begin(points, record(store, tmp_path), goes_on=False)
    first.record.params["train.log_every"] = "20"
    run_to_end(first, "KILLED")
    second = tracking.begin(points, record(store, tmp_path), goes_on=True)
    second.record.params["train.log_every"] = "50"
    second.record.params["train.epochs"] = "3"
    assert run_to_end(second)
    params = MlflowClient(store).get_run(second.record.run_id).data.params
    assert params == {"train.log_every": "20", "train.epochs": "3"}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("bert-2x192_cpu_b32", "bert-2x192_cpu_b32"),
        ("<script>alert('a/b')</script>", "script-alert-a-b-script"),
        ("ein Lauf, heiß", "ein-Lauf-hei"),
        ("x" * 300, "x" * 100),
        ("///", "run"),
    ],
)
def test_names_that_no_browser_or_shell_misreads(name, plain):
    assert facts.plain_name(name) == plain


def test_figures_of_a_report():
    report = {
        "test_accuracy": 0.5,
        "samples_per_s": 10,
        "device": "cpu",
        "mfu_pct": None,
    }
    assert outcomes.report_metrics(report) == {
        "test_accuracy": 0.5,
        "report/samples_per_s": 10.0,
    }
    assert outcomes.report_tags(report) == {"device": "cpu"}


def test_environment_names_every_package(tmp_path):
    facts.write_environment(tmp_path / "environment.json")
    written = json.loads((tmp_path / "environment.json").read_text())
    assert {"torch", "kedro", "mlflow"} <= set(written["packages"])
    assert written["usable_cores"] <= os.cpu_count()


def test_a_masked_model_is_logged_with_an_example_that_it_takes(
    store, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "06_models" / "tokenizer")
    model = task_model("bert", "masked-lm", "sdpa").model
    said = logging.getLogger("mlflow")
    said.addHandler(caplog.handler)
    tracking.use(store)
    with mlflow.start_run():
        uri = models.log_model(model, tokenizer, "masked-lm", "p5 p6")
    said.removeHandler(caplog.handler)
    assert "serving input example" not in caplog.text
    logged = Model.load(mlflow.artifacts.download_artifacts(uri))
    [example] = logged.load_input_example()
    assert example == "[MASK] p5 p6"
