"""The outbox and its thread, against real SQLite stores and a closed port."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sqlite3
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
import pandas as pd
import pytest
from kedro.io import DataCatalog
from kedro_datasets.json import JSONDataset
from mlflow import MlflowClient
from mlflow.models import Model

from flatout import tracking
from flatout.project.recording.model_logging import report_of, warn_where_worse
from flatout.tracking import facts, models, outcomes
from flatout.tracking.outbox import Outbox
from flatout.tracking.pages import figures
from flatout.tracking.sending import Sender
from flatout.tracking.store import process_tags


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
    while not outbox.record.sent_steps and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [step for step, *_ in history(store, outbox.record.run_id)] == [1]
    assert forwarder.finish("FINISHED", 0)


def test_more_points_than_one_request_takes(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    append(points, *range(1, 2502))
    assert run_to_end(outbox)
    assert len(history(store, outbox.record.run_id)) == 2501


@pytest.mark.parametrize("process", ["the same", "another"])
def test_a_training_that_starts_anew_in_its_run_repeats_and_loses_no_point(
    store, tmp_path, points, process
):
    """It empties the file, which may be longer than before at the next look."""
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    client, sender = MlflowClient(store), Sender(outbox)
    append(points, 1, 2, train_loss=0.5)
    run_id = sender.send(client)
    points.write_text("")
    append(points, 1, 2, 3, 4, train_loss=0.25)
    append(points, 4, validation_loss=0.75)
    if process == "another":
        sender = Sender(Outbox.load(points))
    sender.send(client)
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
    client, sender = MlflowClient(store), Sender(outbox)
    run_id = sender.send(client)
    with points.open("a") as file:
        file.write('ics": {"train_loss": 0.25}, "time_s": 1}\n')
    sender.send(client)
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
    assert Sender(second).send(client) == first.record.run_id
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
    client, sender = MlflowClient(store), Sender(outbox)
    run_id = sender.send(client)
    tags = client.get_run(run_id).data.tags
    assert (tags["strategy"], tags["token_budget"]) == ("packed", "512")
    assert "parameters" not in tags
    outbox.record.tags["token_budget"] = "256"  # the report's: memory ran out
    sender.send(client)
    assert client.get_run(run_id).data.tags["token_budget"] == "256"


def test_points_of_a_step_that_was_sent_already(store, tmp_path, points):
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    client, sender = MlflowClient(store), Sender(outbox)
    append(points, 8)
    run_id = sender.send(client)
    append(points, 8, validation_loss=0.5)
    sender.send(client)
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


def test_a_pruned_trial_has_not_failed(store, tmp_path, points):
    rows = {"trial_id": ["001", "002"], "status": ["pruned", "ok"]}
    table = pd.DataFrame({**rows, "train.learning_rate": [0.5, 0.1]})
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    outbox.record.trials = outcomes.nested_runs(table)
    assert run_to_end(outbox)
    client, parent = MlflowClient(store), outbox.record.run_id
    experiment = client.get_run(parent).info.experiment_id
    filters = f"tags.mlflow.parentRunId = '{parent}' AND tags.exit_reason = 'pruned'"
    [pruned] = client.search_runs([experiment], filters)
    assert pruned.info.run_name == "001_learning_rate-0.5"
    assert pruned.info.status == "FINISHED"
    assert pruned.data.params["status"] == "pruned"


def test_a_nested_run_that_the_store_has_is_not_made_again(store, tmp_path, points):
    """As after a kill between a run of the store and the end of all."""
    table = pd.DataFrame({"trial_id": ["a1", "b2"], "samples_per_s": [1.0, 2.0]})
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    outbox.record.trials = outcomes.nested_runs(table)[:1]
    assert run_to_end(outbox)
    outbox.record.trials = outcomes.nested_runs(table)
    assert run_to_end(outbox)
    client, parent = MlflowClient(store), outbox.record.run_id
    experiment = client.get_run(parent).info.experiment_id
    nested = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent}'")
    assert sorted(run.info.run_name for run in nested) == ["a1", "b2"]


def test_points_of_a_training_outside_kedro_are_kept_and_not_sent(
    store, tmp_path, points
):
    append(points, 5)
    outbox = tracking.begin(points, record(store, tmp_path), goes_on=False)
    assert points.with_name("train_metrics.earlier.jsonl").is_file()
    append(points, 1)
    assert run_to_end(outbox)
    assert [step for step, *_ in history(store, outbox.record.run_id)] == [1]


def test_a_trial_without_a_time_is_a_run_too():
    table = pd.DataFrame({"trial_id": ["a1", "b2"], "elapsed_s": [float("nan"), 2.0]})
    first, second = outcomes.nested_runs(table)
    assert first["start_ms"] == first["end_ms"] == second["start_ms"]
    assert second["end_ms"] - second["start_ms"] == 2000


@pytest.fixture
def registry(store, tmp_path, monkeypatch):
    """Registers a model of given loss and tokens; models are folders of one file."""
    tracking.use(store)
    client = MlflowClient(store)
    experiment = client.create_experiment("models", str(tmp_path / "mlartifacts"))
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "weights").write_text("w")

    def register(loss: float, tokens: str, keep: int | None = None) -> str:
        with mlflow.start_run(experiment_id=experiment):
            logged = mlflow.initialize_logged_model("model")
            Model(model_id=logged.model_id).save(str(folder / "MLmodel"))
            client.log_model_artifacts(logged.model_id, str(folder))
            mlflow.finalize_logged_model(logged.model_id, "READY")
        return models.register(
            f"models:/{logged.model_id}", "flatout", models.Trained(loss, tokens), keep
        )

    return client, register, tmp_path / "mlartifacts"


def aliases(client) -> dict[str, str]:
    found = client.get_registered_model("flatout").aliases
    return {alias: str(version) for alias, version in found.items()}


def test_the_champion_is_the_best_on_the_latest_data(registry, caplog):
    caplog.set_level(logging.INFO)
    client, register, _ = registry
    told = []
    for loss, tokens, best in [
        (0.1, "demo-tokens", 1),  # other data: its loss does not compare
        (0.9, "my-tokens", 2),
        (0.8, "my-tokens", 3),
        (0.85, "my-tokens", 3),
        (float("nan"), "my-tokens", 3),
        (0.2, "demo-tokens", 1),
    ]:
        assert register(loss, tokens) == f"models:/flatout/{best}"
        assert aliases(client)["champion"] == str(best)
        told.append(caplog.messages[-1].split(": ", 1)[1])
    assert aliases(client) == {
        "champion": "1",
        "champion-demo-tok": "1",
        "champion-my-token": "3",
    }
    assert told[1] == "champion, the first on this data"
    assert told[2] == (
        "champion on this data, validation loss 0.8000; before it version 2, 0.9000"
    )
    assert told[3] == (
        "version 3 stays the champion on this data, validation loss 0.8000 against "
        "0.8500"
    )
    tags = [client.get_model_version("flatout", str(n)).tags for n in range(1, 7)]
    assert [tag["verdict"] for tag in tags] == told


def test_models_that_nobody_named_are_deleted(registry, caplog):
    """Kept: the newest, champions of each data, and what the user has marked."""
    caplog.set_level(logging.INFO)
    client, register, folder = registry
    for loss, tokens in (
        (0.5, "other"),
        (0.6, "other"),
        (0.7, "other"),
        (0.8, "other"),
    ):
        register(loss, tokens)
    client.set_registered_model_alias("flatout", "production", "2")
    client.set_model_version_tag("flatout", "3", "paper", "table 1")
    register(0.3, "t")
    register(0.4, "t", keep=2)
    found = client.search_model_versions("name = 'flatout'")
    assert sorted(int(version.version) for version in found) == [1, 2, 3, 5, 6]
    assert "deleted from MLflow: version 4 of" in caplog.messages[-1]
    assert len(list(folder.rglob("weights"))) == 5
    for version in found:
        model = client.get_logged_model(version.source.removeprefix("models:/"))
        assert Path(model.artifact_location.removeprefix("file://"), "weights").exists()


def has_files(name, version) -> bool:
    """Whether the weights that a version names can be fetched."""
    with TemporaryDirectory() as folder:
        uri = f"models:/{name}/{version}"
        return Path(mlflow.artifacts.download_artifacts(uri, dst_path=folder)).is_dir()


def test_a_model_that_another_version_points_at_is_not_deleted(registry):
    """MLflow's own ways to name a model once more make no copy of its files."""
    client, register, _ = registry
    for loss in (0.1, 0.5, 0.6, 0.7, 0.8):
        register(loss, "t")
    client.copy_model_version("models:/flatout/2", "production")
    source = client.get_model_version("flatout", "3").source
    mlflow.register_model(source, "own")
    client.create_registered_model("path")
    four = client.get_model_version("flatout", "4").source
    place = client.get_logged_model(four.removeprefix("models:/")).artifact_location
    client.create_model_version("path", place)
    client.copy_model_version("models:/flatout/1", "flatout")  # version 6
    register(0.9, "t", keep=1)
    found = client.search_model_versions("name = 'flatout'")
    assert sorted(int(version.version) for version in found) == [1, 2, 3, 4, 6, 7]
    for name, version in (("production", 1), ("own", 1), ("path", 1), ("flatout", 6)):
        assert has_files(name, version)


def test_the_store_knows_whether_it_has_a_model(registry, tmp_path, closed_port):
    client, register, _ = registry
    for loss in (0.5, 0.6, 0.7):
        register(loss, "t")
    uris = [client.get_model_version("flatout", n).source for n in "123"]
    client.delete_model_version("flatout", "2")
    client.delete_logged_model(uris[2].removeprefix("models:/"))
    assert [models.is_there(uri, "flatout") for uri in uris] == [True, False, False]
    assert [models.is_there(uri, None) for uri in uris] == [True, True, False]
    assert not models.is_there(uris[0], "another name")
    tracking.use(f"sqlite:///{tmp_path}/new.db")
    assert not models.is_there(uris[0], "flatout")
    tracking.use(closed_port)
    assert models.is_there(uris[0], "flatout")


def test_a_registry_of_before_loses_nothing(registry):
    """Its versions have no verdict, and their only alias is `champion`."""
    client, register, folder = registry
    for loss, tokens in ((0.5, "former"), (0.3, "former"), (0.4, "former")):
        register(loss, tokens)
    for version in "123":
        client.delete_model_version_tag("flatout", version, models.VERDICT)
    client.delete_registered_model_alias("flatout", "champion-former")
    for _ in range(3):
        register(0.7, "later", keep=1)
    assert aliases(client) == {
        "champion": "4",
        "champion-former": "2",
        "champion-later": "4",
    }
    found = client.search_model_versions("name = 'flatout'")
    assert sorted(int(version.version) for version in found) == [1, 2, 3, 4, 6]
    assert len(list(folder.rglob("weights"))) == 5


def test_a_deletion_that_fails_is_done_by_the_next_training(
    registry, caplog, monkeypatch
):
    client, register, folder = registry
    for loss in (0.1, 0.5):
        register(loss, "t")

    def fails(*_):
        raise OSError("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "delete_model_version", fails)
        register(0.6, "t", keep=1)
    assert "version 2 of the model flatout could not be deleted whole: the" in (
        caplog.text
    )
    register(0.7, "t", keep=1)
    found = client.search_model_versions("name = 'flatout'")
    assert sorted(int(version.version) for version in found) == [1, 4]
    assert len(list(folder.rglob("weights"))) == 2


@pytest.mark.parametrize(
    ("before", "champion", "told"),
    [
        ({"validation_loss": 0.5, "token_key": "t"}, "models:/flatout/1", True),
        ({"validation_loss": 0.5, "token_key": "t"}, None, True),
        ({"validation_loss": 0.7, "token_key": "t"}, "models:/flatout/2", False),
        ({"validation_loss": 0.5, "token_key": "other"}, "models:/flatout/2", False),
        ({}, None, False),
    ],
)
def test_a_worse_model_in_the_catalog_is_told_of(
    tmp_path, caplog, before, champion, told
):
    report = JSONDataset(filepath=str(tmp_path / "report.json"))
    report.save(before)
    model = JSONDataset(filepath=str(tmp_path / "model.json"))
    model.save({})
    catalog = DataCatalog({"train_report": report, "model": model})
    now = {"validation_loss": 0.6, "token_key": "t"}
    warn_where_worse(report_of(catalog), now, champion)
    assert len(caplog.messages) == int(told)
    if told:
        assert "(loss 0.6000, before 0.5000)" in caplog.text
        assert (champion or "MLflow has no better one") in caplog.text


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
        "validation_f1_macro": 0.25,
        "samples_per_s": 10,
        "device": "cpu",
        "mfu_pct": None,
    }
    metrics = {"test_accuracy": 0.5, "validation_f1_macro": 0.25}
    assert outcomes.report_metrics(report) == metrics
    chosen = outcomes.report_metrics({**report, "test_mae": 2}, "test_mae")
    assert chosen == {**metrics, "test_mae": 2.0}
    found = figures.report_figures(report)
    assert found == {"samples_per_s": 10.0, "test_accuracy": 0.5}
    tags = figures.figure_tags(found)
    assert figures.tagged_figures({**tags, "mfu_pct": "?"}) == {"samples_per_s": 10.0}
    assert outcomes.report_tags(report) == {"device": "cpu"}


def test_environment_names_every_package(tmp_path):
    facts.write_environment(tmp_path / "points.jsonl")
    written = json.loads((tmp_path / "environment.json").read_text())
    assert {"torch", "kedro", "mlflow"} <= set(written["packages"])
    assert written["usable_cores"] <= os.cpu_count()


def test_a_record_is_saved_while_another_thread_adds_to_it(tmp_path, points, caplog):
    outbox = tracking.Outbox(points, record("sqlite:///unused", tmp_path))
    ended, usual = threading.Event(), sys.getswitchinterval()

    def send():
        while not ended.is_set():
            for step in range(500):
                outbox.record.settled[f"tag {step}"] = "sent"
                outbox.record.sent_steps[f"metric {step}"] = step
            outbox.record.settled.clear()

    thread = threading.Thread(target=send)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for number in range(100):
            outbox.record.metrics["saved"] = number
            outbox.save()
            assert tracking.Outbox.load(points).record.metrics == {"saved": number}
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(usual)
    assert not caplog.records


def test_an_older_record_never_replaces_a_newer_one(points, tmp_path, monkeypatch):
    outbox = tracking.Outbox(points, record("sqlite:///unused", tmp_path))
    older, newer = threading.Event(), threading.Event()
    dumps = json.dumps

    def slow_dumps(*args, **kwargs):
        text = dumps(*args, **kwargs)
        if threading.current_thread() is thread:
            older.set()
            newer.wait(0.5)
        return text

    thread = threading.Thread(target=outbox.save)
    monkeypatch.setattr(json, "dumps", slow_dumps)
    thread.start()
    older.wait()
    outbox.record.status = "FINISHED"
    outbox.save()
    newer.set()
    thread.join()
    assert tracking.Outbox.load(points).record.status == "FINISHED"


def test_a_record_that_cannot_be_written_ends_no_run(store, tmp_path, points, caplog):
    outbox = tracking.Outbox(points, record(store, tmp_path))
    outbox.record.tags["exit_reason"] = "finished"
    outbox.record.trials = [{"no": object()}]  # of no type that JSON has
    forwarder = tracking.Forwarder(outbox)
    forwarder.start()
    forwarder.finish("FINISHED", outbox.record.start_ms, limit_s=0.1)
    assert "could not be written" in caplog.text
