"""The tracking program with SQLite stores, a closed port and a locked file."""

import json
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlflow
import pandas as pd
import pytest
from mlflow import MlflowClient
from transformers import AutoTokenizer, pipeline

from flatout import tracking
from flatout.engine.files.calibration import CALIBRATION, Calibration
from flatout.engine.parameters import Settings
from flatout.project.hooks.tracking import TrackingHooks
from flatout.tracking import facts, follow, models, outcomes, program, store as stores
from flatout.tracking.mlflow_sender import MlflowSender
from flatout.tracking.record import SavedModel, Sent, newest_ns
from flatout.tracking.store import process_tags
from tests import warm
from tests.engine.families import task_model
from tests.pipelines.tokens import write_tokens

START_S = 1_700_000_000


def record(uri: str, tmp_path: Path, **changes) -> tracking.RunRecord:
    return tracking.RunRecord(
        tracking_uri=uri,
        experiment="flatout",
        name="bert_cpu_b8",
        artifact_location=str(tmp_path / "artifacts"),
        start_ms=1000 * START_S,
        **{"tags": {"exit_reason": "running"}, **changes},
    )


def begin(points: Path, record: tracking.RunRecord, *, goes_on=False):
    record.points, record.reporting = str(points), str(points.parent)
    return tracking.begin(parent_of(points), record, goes_on=goes_on)


def parent_of(points: Path) -> Path:
    return points.with_name("tracking")


def append(points: Path, *steps: int, **metrics: float) -> None:
    """Append lines in the format of the engine."""
    points.parent.mkdir(parents=True, exist_ok=True)
    with points.open("a") as file:
        for step in steps:
            values = metrics or {"train_loss": 1 / step}
            line = {"step": step, "time_s": START_S + step, "metrics": values}
            file.write(json.dumps(line) + "\n")


def history(uri: str, run_id: str, metric: str = "train_loss") -> list[tuple]:
    found = MlflowClient(uri).get_metric_history(run_id, metric)
    return sorted((m.step, m.value, m.timestamp) for m in found)


@pytest.fixture
def points(tmp_path: Path) -> Path:
    return tmp_path / "reporting" / "train_metrics.jsonl"


@pytest.fixture
def closed_port() -> str:
    """Return the URI of a server that does not exist."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def id_of(folder: tracking.RunFolder, uri: str | None = None) -> str:
    found = Sent.load(folder.path, uri or folder.record.tracking_uri).run_id
    assert found
    return found


def run_to_end(folder: tracking.RunFolder, status: str = "FINISHED") -> bool:
    """Follow a run to its end, as `python -m flatout.tracking FOLDER` does."""
    folder.record.status = status
    ended = Sent.load(folder.path, folder.record.tracking_uri).ended or [0]
    folder.record.end_ms = max(ended[-1], folder.record.start_ms + 4999) + 1
    folder.save()
    follow.follow(folder.path)
    return folder.is_complete()


@pytest.fixture
def warm_program(monkeypatch) -> None:
    monkeypatch.setattr(program, "start", warm.start_program)


def send(folder: tracking.RunFolder) -> tuple[MlflowSender, str]:
    sender = MlflowSender(folder)
    return sender, sender.send(sender.client())


def test_a_run_reaches_the_store_whole(store, tmp_path, points):
    folder = begin(points, record(store, tmp_path))
    append(points, 2, 4, train_loss=0.5, learning_rate=1e-3)
    folder.record.params["train.epochs"] = "3"
    folder.record.metrics["test_accuracy"] = 0.75
    report = points.with_name("train_report.json")
    report.write_text("{}")

    assert run_to_end(folder)

    run = MlflowClient(store).get_run(id_of(folder))
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


@pytest.mark.process
def test_points_arrive_while_the_run_goes_on(store, tmp_path, points):
    """The program itself sends them, and exits when the run ends."""
    known = record(store, tmp_path, tags=process_tags(), system_metrics=True)
    folder = begin(points, known)
    runs = program.Program(folder, {})
    append(points, 1)
    deadline = time.monotonic() + 120
    while "train_loss" not in Sent.load(folder.path, store).steps:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [step for step, *_ in history(store, id_of(folder))] == [1]
    assert MlflowClient(store).get_run(id_of(folder)).info.status == "RUNNING"
    append(points, 2)
    folder.end("FINISHED")
    assert runs.finish(limit_s=120) == []
    assert [step for step, *_ in history(store, id_of(folder))] == [1, 2]
    assert MlflowClient(store).get_run(id_of(folder)).info.status == "FINISHED"


def test_more_points_than_one_request_takes(store, tmp_path, points):
    folder = begin(points, record(store, tmp_path))
    append(points, *range(1, 2502))
    assert run_to_end(folder)
    assert len(history(store, id_of(folder))) == 2501


@pytest.mark.parametrize("process", ["the same", "another"])
def test_a_training_that_starts_anew_in_its_run_repeats_and_loses_no_point(
    store, tmp_path, points, process
):
    """The new start empties the file, which may already be longer at the next check."""
    folder = begin(points, record(store, tmp_path))
    sender = MlflowSender(folder)
    client = sender.client()
    append(points, 1, 2, train_loss=0.5)
    run_id = sender.send(client)
    points.write_text("")
    append(points, 1, 2, 3, 4, train_loss=0.25)
    append(points, 4, validation_loss=0.75)
    if process == "another":
        sender = MlflowSender(tracking.RunFolder.load(folder.path))
    sender.send(client)
    assert [(s, loss) for s, loss, _ in history(store, run_id)] == [
        *((1, 0.5), (2, 0.5)),
        *((3, 0.25), (4, 0.25)),
    ]
    assert [s for s, *_ in history(store, run_id, "validation_loss")] == [4]


def test_a_half_written_line_waits_and_a_broken_one_is_passed(store, tmp_path, points):
    folder = begin(points, record(store, tmp_path))
    append(points, 1)
    with points.open("a") as file:
        file.write('not json\n{"event": "evaluated"}\n{"step": 2, "metr')
    sender = MlflowSender(folder)
    client = sender.client()
    run_id = sender.send(client)
    with points.open("a") as file:
        file.write('ics": {"train_loss": 0.25}, "time_s": 1800000000}\n')
    sender.send(client)
    assert [step for step, *_ in history(store, run_id)] == [1, 2]


def test_nothing_is_sent_twice_by_a_run_that_goes_on(store, tmp_path, points):
    first = begin(points, record(store, tmp_path))
    append(points, 1, 2)
    run_to_end(first, "KILLED")
    append(points, 3)  # written before the kill, but not sent
    # Resumed from the checkpoint of step 1: steps 2 and 3 are trained and logged again,
    # and the evaluation at step 3 is new.
    second = begin(points, record(store, tmp_path), goes_on=True)
    append(points, 2, 3)
    append(points, 3, validation_loss=0.5)
    client = MlflowClient(store)
    run_id = id_of(first)
    assert client.get_run(run_id).info.status == "KILLED"
    assert MlflowSender(second).send(client) == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    append(points, 4)
    assert run_to_end(second)
    assert id_of(second) == run_id
    assert [step for step, *_ in history(store, run_id)] == [1, 2, 3, 4]
    assert [step for step, *_ in history(store, run_id, "validation_loss")] == [3]
    [run] = client.search_runs([client.get_experiment_by_name("flatout").experiment_id])
    assert run.info.status == "FINISHED"


def test_points_that_are_sent_again_change_nothing(store, tmp_path, points):
    """This happens if the program is killed before it stores what it has sent."""
    folder = begin(points, record(store, tmp_path))
    append(points, 1, 2)
    sender, run_id = send(folder)
    before = history(store, run_id)
    sender.sent.steps.clear()
    sender.save()
    assert run_to_end(folder)
    assert history(store, run_id) == before


@pytest.mark.parametrize("lost", ["moved", "emptied", "deleted there"])
def test_a_run_goes_on_whole_where_the_store_does_not_know_it(
    store, empty_store, tmp_path, points, lost
):
    first = begin(points, record(store, tmp_path))
    first.record.params["train.epochs"] = "3"
    append(points, 1, 2)
    run_to_end(first, "KILLED")
    before = id_of(first)
    if lost == "moved":
        store = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'other.db')}"
    elif lost == "emptied":
        shutil.copy(empty_store, tmp_path / "mlflow.db")
    else:
        MlflowClient(store).delete_run(before)
    second = begin(points, record(store, tmp_path), goes_on=True)
    append(points, 2, 3)
    assert run_to_end(second)
    run = MlflowClient(store).get_run(id_of(second))
    assert run.info.run_id != before
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.epochs": "3"}
    assert [step for step, *_ in history(store, run.info.run_id)] == [1, 2, 3]


def test_points_of_a_step_that_was_sent_already(store, tmp_path, points):
    folder = begin(points, record(store, tmp_path))
    sender = MlflowSender(folder)
    client = sender.client()
    append(points, 8)
    run_id = sender.send(client)
    append(points, 8, validation_loss=0.5)
    sender.send(client)
    assert [step for step, *_ in history(store, run_id, "validation_loss")] == [8]


def test_a_finished_run_is_not_gone_on_with(store, tmp_path, points):
    first = begin(points, record(store, tmp_path))
    append(points, 1)
    run_to_end(first)
    later = record(store, tmp_path)
    later.start_ms += 100_000
    second = begin(points, later, goes_on=True)
    append(points, 101, 102)
    assert run_to_end(second)
    assert id_of(second) != id_of(first)
    assert [step for step, *_ in history(store, id_of(second))] == [101, 102]


def test_a_finished_training_asked_for_again_keeps_its_points(store, tmp_path, points):
    """No new run is recorded, and another store still receives the earlier run."""
    first = begin(points, record(store, tmp_path))
    append(points, 1, 2)
    run_to_end(first)
    for _ in range(2):
        later = record(store, tmp_path)
        later.start_ms += 100_000
        again = begin(points, later)
        assert again.earlier.path == first.path
        assert run_to_end(again, "DROPPED")
    assert len(points.read_text().splitlines()) == 2
    client = MlflowClient(store)
    [run] = client.search_runs([client.get_experiment_by_name("flatout").experiment_id])
    assert run.info.run_id == id_of(first)
    assert follow.sync(parent_of(points)) == []


@pytest.mark.process
def test_the_program_of_a_dropped_run_ends_before_its_folder_is_deleted(
    store, tmp_path, points, warm_program
):
    """Otherwise, it would not know that the run is dropped, and record it as killed."""
    folder = begin(points, record(store, tmp_path, tags=process_tags()))
    runs = program.Program(folder, {})
    folder.end("DROPPED")
    assert runs.finish() == []
    assert runs._process.returncode == 0


@pytest.mark.process
def test_a_dead_server_costs_seconds_and_no_point(
    store, tmp_path, points, closed_port, caplog, warm_program
):
    live = {**process_tags(), "exit_reason": "running"}
    folder = begin(points, record(closed_port, tmp_path, tags=live))
    append(points, 1, 2)
    runs = program.Program(folder, {})
    while not Sent.load(folder.path, closed_port).fault:
        assert runs._process.poll() is None
        time.sleep(0.05)
    folder.end("FINISHED")
    begin_s = time.monotonic()
    assert runs.finish() == ["this run"]
    assert time.monotonic() - begin_s < program.FAILING_LIMIT_S + 1
    assert "does not have this run" in caplog.text
    assert "`kedro flatout sync` sends it" in caplog.text
    assert "not sent" in follow.sync(parent_of(points))[0]

    # The next run sets it aside. A sync sends both once the store is available.
    later = record(closed_port, tmp_path)
    later.start_ms += 5000
    second = begin(points, later)
    points.write_text("")
    append(points, 7)
    assert not run_to_end(second)
    for file in parent_of(points).rglob("run.json"):
        file.write_text(file.read_text().replace(closed_port, store))
    lines = follow.sync(parent_of(points))
    assert len(lines) == 2
    sent = [line.rsplit(" ", 1)[1] for line in lines]
    assert [[s for s, *_ in history(store, run)] for run in sent] == [[1, 2], [7]]
    assert follow.sync(parent_of(points)) == []


def test_what_a_store_lacks_is_sent_to_another_one_once(
    store, empty_store, closed_port, tmp_path, points
):
    (there := tmp_path / "there").mkdir()
    other = f"sqlite:///{shutil.copy(empty_store, there / 'other.db')}"
    stores.prepare(closed_port)  # otherwise MLflow waits for minutes
    folder, parent = begin(points, record(closed_port, tmp_path)), parent_of(points)
    append(points, 1, 2)
    assert not run_to_end(folder)
    [line] = follow.sync(parent, closed_port)
    assert line.startswith(f"bert_cpu_b8: not sent to {closed_port} (")
    [line] = follow.sync(parent, other)
    said, run_id = line.rsplit(" ", 1)
    assert said == f"bert_cpu_b8: sent to {other} as run"
    assert [step for step, *_ in history(other, run_id)] == [1, 2]
    found = MlflowClient(other).get_run(run_id).info
    assert found.status == "FINISHED"
    assert found.artifact_uri == str(there / "mlartifacts" / run_id / "artifacts")
    assert follow.sync(parent) == follow.sync(parent, store) == []


def test_a_sync_that_breaks_is_continued_in_the_same_store(
    store, closed_port, tmp_path, points, monkeypatch
):
    folder, parent = begin(points, record(closed_port, tmp_path)), parent_of(points)
    append(points, 1, 2)
    folder.end("FINISHED")
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "set_terminated", None)
        [line] = follow.sync(parent, store)
    assert line.startswith(f"bert_cpu_b8: not sent to {store} (")
    first = id_of(folder, store)
    assert follow.sync(parent) == [f"bert_cpu_b8: sent to {store} as run {first}"]


@pytest.mark.process
def test_a_locked_store_costs_seconds_and_no_point(
    store, tmp_path, points, warm_program
):
    folder = begin(points, record(store, tmp_path, tags=process_tags()))
    append(points, 1)
    lock = sqlite3.connect(store.removeprefix("sqlite:///"))
    lock.execute("BEGIN EXCLUSIVE")
    runs = program.Program(folder, {})
    folder.end("FINISHED")
    begin_s = time.monotonic()
    assert runs.finish(limit_s=4) == ["this run"]
    assert time.monotonic() - begin_s < 5
    lock.rollback()
    lock.close()
    assert "sent to" in follow.sync(parent_of(points))[0]
    assert [step for step, *_ in history(store, id_of(folder))] == [1]


@pytest.mark.process
def test_a_store_that_responds_again_gets_the_whole_time(
    store, tmp_path, points, monkeypatch
):
    """The fault is from an earlier delivery, and the last one takes longer than the
    limit for stores that fail."""
    folder = begin(points, record(store, tmp_path))
    append(points, 1)
    sender = MlflowSender(folder)
    sender.sent.fault = "refused"
    sender.save()
    slow = ["sleep", str(program.FAILING_LIMIT_S + 1)]
    monkeypatch.setattr(program, "start", lambda *_: subprocess.Popen(slow))
    runs = program.Program(folder, {})
    later = threading.Timer(0.5, sender.send, [sender.client()])
    later.start()
    assert runs.finish() == ["the last points and reports of this run"]
    later.join()
    assert runs._process.returncode == 0


@pytest.mark.process
@pytest.mark.parametrize("killed", ["the program", "the run"])
def test_a_kill_costs_no_point(store, tmp_path, points, warm_program, killed):
    """The process of the run only sleeps in this test."""
    sleeper = subprocess.Popen(["sleep", "600"])
    started_s = stores.psutil.Process(sleeper.pid).create_time()
    tags = {
        **process_tags(),
        "flatout.pid": str(sleeper.pid),
        "flatout.started_s": f"{started_s:.2f}",
    }
    folder = begin(points, record(store, tmp_path, tags=tags))
    runs = program.Program(folder, {})
    append(points, 1, 2)
    if killed == "the program":
        runs._process.kill()
        sleeper.kill()
        sleeper.wait()
        assert "sent to" in follow.sync(parent_of(points))[0]
    else:
        sleeper.kill()
        sleeper.wait()
        assert runs._process.wait(120) == 0
    assert follow.sync(parent_of(points)) == []
    assert [step for step, *_ in history(store, id_of(folder))] == [1, 2]
    assert MlflowClient(store).get_run(id_of(folder)).info.status == "KILLED"


def test_the_load_of_the_machine_is_sent_beside_the_points(
    store, tmp_path, points, monkeypatch
):
    """The metrics go through a file, so that a store receives them even after an
    outage."""
    monkeypatch.setattr(follow, "INTERVAL_S", 0.1)
    known = record(store, tmp_path, tags=process_tags(), system_metrics=True)
    folder = begin(points, known)
    append(points, 1)
    follower = follow.Follower(folder)
    for _ in range(3):
        follower._sample()
    follower.deliver()
    load = history(store, id_of(folder), "system/cpu_utilization_percentage")
    assert [step for step, *_ in load] == [1, 2]
    assert all(0 <= share <= 100 for _, share, _ in load)
    follower = follow.Follower(folder)  # from a run that continues
    for _ in range(2):
        follower._sample()
    follower.deliver()
    load = history(store, id_of(folder), "system/cpu_utilization_percentage")
    assert [step for step, *_ in load] == [1, 2, 3]


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
    folder = begin(points, record(store, tmp_path))
    folder.record.trials = outcomes.nested_runs(table)
    assert run_to_end(folder)
    client = MlflowClient(store)
    parent = id_of(folder)
    experiment = client.get_run(parent).info.experiment_id
    nested = client.search_runs(
        [experiment], f"tags.mlflow.parentRunId = '{parent}'", order_by=["run_name"]
    )
    assert [(r.info.run_name, r.info.status, r.data.metrics) for r in nested] == [
        (
            "a1_end_to_end",
            "FINISHED",
            {"samples_per_s": 120.5, "elapsed_s": 9.5},
        ),
        ("b2_TF32-again", "FAILED", {"elapsed_s": 61.25}),
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
    folder = begin(points, record(store, tmp_path))
    folder.record.trials = outcomes.nested_runs(table)
    assert run_to_end(folder)
    client, parent = MlflowClient(store), id_of(folder)
    experiment = client.get_run(parent).info.experiment_id
    filters = f"tags.mlflow.parentRunId = '{parent}' AND tags.exit_reason = 'pruned'"
    [pruned] = client.search_runs([experiment], filters)
    assert pruned.info.run_name == "001_learning_rate-0.5"
    assert pruned.info.status == "FINISHED"
    assert pruned.data.params["status"] == "pruned"


def test_a_nested_run_that_the_store_has_is_not_made_again(store, tmp_path, points):
    """This happens after a kill between a run of the store and the end of all runs."""
    table = pd.DataFrame({"trial_id": ["a1", "b2"], "samples_per_s": [1.0, 2.0]})
    folder = begin(points, record(store, tmp_path))
    folder.record.trials = outcomes.nested_runs(table)[:1]
    assert run_to_end(folder)
    folder.record.trials = outcomes.nested_runs(table)
    assert run_to_end(folder)
    client, parent = MlflowClient(store), id_of(folder)
    experiment = client.get_run(parent).info.experiment_id
    nested = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent}'")
    assert sorted(run.info.run_name for run in nested) == ["a1", "b2"]


def test_a_trial_without_a_time_is_a_run_too():
    table = pd.DataFrame({"trial_id": ["a1", "b2"], "elapsed_s": [float("nan"), 2.0]})
    first, second = outcomes.nested_runs(table)
    assert first["start_ms"] == first["end_ms"] == second["start_ms"]
    assert second["end_ms"] - second["start_ms"] == 2000


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A masked language model and its tokenizer, as the catalog stores them."""
    folder = write_tokens(tmp_path_factory.mktemp("saved")) / "06_models"
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for part in (task_model("bert", "masked-lm", "sdpa").model, tokenizer):
        part.save_pretrained(folder / "model")
    return folder / "model"


def described(saved: Path, loss: float, tokens: str = "t") -> dict:
    return asdict(
        SavedModel(
            folder=str(saved),
            saved_ns=newest_ns(saved),
            task="fill-mask",
            registered_model="flatout",
            validation_loss=loss,
            token_key=tokens,
        )
    )


def test_a_saved_model_is_in_the_registry_and_loads(store, tmp_path, points, saved):
    folder = begin(points, record(store, tmp_path))
    append(points, 1)
    folder.record.model = described(saved, 0.5)
    assert run_to_end(folder)
    client = MlflowClient(store)
    version = client.get_model_version_by_alias("flatout", "champion")
    assert version.run_id == id_of(folder)
    assert version.tags == {"validation_loss": "0.5", "token_key": "t"}
    assert client.get_run(id_of(folder)).info.status == "FINISHED"
    made = client.get_logged_model(version.source.removeprefix("models:/"))
    assert made.artifact_location.startswith(str(tmp_path / "artifacts"))
    loaded = mlflow.pyfunc.load_model("models:/flatout@champion")
    assert loaded.metadata.signature is not None
    found = loaded.predict(["p5 [MASK]"])
    expected = pipeline("fill-mask", model=str(saved))(["p5 [MASK]"])
    assert [a["token"] for a in found] == [a["token"] for a in expected]


def test_a_kill_behind_the_model_makes_no_second_version(
    store, tmp_path, points, saved
):
    """This holds if the program is killed before it stores the model, or the run
    continues."""
    folder = begin(points, record(store, tmp_path))
    append(points, 1)
    folder.record.model = described(saved, 0.5)
    folder.save()
    sender, run_id = send(folder)
    sender.sent.model = None
    sender.save()
    again = begin(points, record(store, tmp_path), goes_on=True)
    assert again.record.model
    assert run_to_end(again)
    assert id_of(again) == run_id
    client = MlflowClient(store)
    assert len(client.search_model_versions("name = 'flatout'")) == 1
    assert len(client.get_run(run_id).outputs.model_outputs) == 1


def test_a_model_that_was_overwritten_is_not_sent_as_another(
    store, tmp_path, points, saved, caplog
):
    folder = begin(points, record(store, tmp_path))
    folder.record.model = {**described(saved, 0.5), "saved_ns": 1}
    assert run_to_end(folder)
    assert "now has the model of another run" in caplog.text
    assert MlflowClient(store).search_model_versions("name = 'flatout'") == []


def test_the_champion_is_the_best_on_the_latest_data(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    client = stores.connect(store)
    client.create_experiment("models", str(tmp_path / "artifacts"))
    mlflow.set_experiment("models")
    told = []
    for loss, tokens, best in [
        (0.1, "demo-tokens", 1),  # other data, so its loss is not comparable
        (0.9, "my-tokens", 2),
        (0.8, "my-tokens", 3),
        (0.85, "my-tokens", 3),
        (float("nan"), "my-tokens", 3),
        (0.2, "demo-tokens", 1),
    ]:
        uri = mlflow.initialize_logged_model("model").model_uri
        found = SavedModel(**described(tmp_path, loss, tokens))
        models.register(client, uri, found)
        version = client.get_model_version_by_alias("flatout", "champion")
        assert str(version.version) == str(best)
        told.append(caplog.messages[-1].split(": ", 1)[1])
    assert told[2] == (
        "validation loss 0.8000; the champion on this data is version 3, 0.8000"
    )
    assert told[3].endswith("0.8500; the champion on this data is version 3, 0.8000")
    assert client.get_registered_model("flatout").aliases.keys() == {"champion"}


@pytest.mark.parametrize(
    ("trained", "champion", "told"),
    [
        # (setting, seed, loss): one seed, two settings that differ by noise, and three
        # that do not.
        ([("a", 1, 0.9), ("b", 1, 0.2)], 1, "runtime.seed"),
        ([("a", 1, 0.9), ("a", 2, 0.7), ("b", 1, 0.8), ("b", 2, 0.69)], 2, "seed"),
        (
            [("a", n, 0.9 + n / 100) for n in range(3)]
            + [("b", n, 0.5 + n / 90) for n in range(3)],
            4,
            "is version 4",
        ),
        ([("a", 1, float("nan")), ("b", 1, 0.8)], 2, "is version 2"),
    ],
)
def test_another_setting_is_champion_only_beyond_noise(
    store, tmp_path, caplog, trained, champion, told
):
    caplog.set_level(logging.INFO)
    client = stores.connect(store)
    client.create_experiment("models", str(tmp_path / "artifacts"))
    mlflow.set_experiment("models")
    for setting, seed, loss in trained:
        uri = mlflow.initialize_logged_model("model").model_uri
        facts = {**described(tmp_path, loss), "setting": setting, "seed": seed}
        models.register(client, uri, SavedModel(**facts))
    version = client.get_model_version_by_alias("flatout", "champion")
    assert int(version.version) == champion
    assert told in caplog.messages[-1]


def test_a_parameter_that_changed_keeps_its_first_value(store, tmp_path, points):
    first = begin(points, record(store, tmp_path))
    first.record.params["train.log_every"] = "20"
    run_to_end(first, "KILLED")
    second = begin(points, record(store, tmp_path), goes_on=True)
    second.record.params["train.log_every"] = "50"
    second.record.params["train.epochs"] = "3"
    assert run_to_end(second)
    params = MlflowClient(store).get_run(id_of(second)).data.params
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
    found = outcomes.report_figures(report)
    assert found == {"samples_per_s": 10.0, **metrics}
    assert outcomes.figure_tags(found) == {"samples_per_s": "10"}
    assert outcomes.report_tags(report) == {"device": "cpu"}


def test_a_record_that_cannot_be_written_ends_no_run(store, tmp_path, points, caplog):
    folder = begin(points, record(store, tmp_path))
    folder.record.trials = [{"no": object()}]  # a type that JSON does not have
    folder.save()
    assert "could not be written" in caplog.text
    assert tracking.RunFolder.load(folder.path).record.trials == []


def test_a_metric_with_a_curve_has_one_value_a_step(store, tmp_path, points):
    """The value of the best model is in the description."""
    folder = begin(points, record(store, tmp_path))
    append(points, 4, 8, validation_loss=0.75)
    folder.record.metrics = {"validation_loss": 0.5, "test_accuracy": 0.25}
    assert run_to_end(folder)
    found = history(store, id_of(folder), "validation_loss")
    assert [(step, value) for step, value, _ in found] == [(4, 0.75), (8, 0.75)]
    assert len(history(store, id_of(folder), "test_accuracy")) == 1
    page = MlflowClient(store).get_run(id_of(folder)).data.tags[outcomes.DESCRIPTION]
    assert "| validation_loss | 0.5 |" in page


def test_a_training_that_has_not_begun_is_no_run(store, tmp_path, points):
    """Until the first step, the file contains the points of an earlier run."""
    append(points, 1, 2)
    known = begin(points, record(store, tmp_path))
    run_to_end(known)
    later = record(store, tmp_path)
    later.start_ms += 100_000
    folder = begin(points, later)
    assert send(folder)[1] is None
    assert run_to_end(folder, "FAILED")
    assert MlflowClient(store).get_run(id_of(folder)).data.metrics == {}


@pytest.mark.parametrize("group", ["evaluate", "model", None])
def test_a_model_is_logged_after_its_calibration(tmp_path, monkeypatch, group):
    """The description starts the upload, and a calibration is written after the
    model."""
    picks = {"label_threshold": "auto", "name_or_path": "some/model"}
    asked = {"evaluate": {"calibrate": True}, "model": picks}
    settings = Settings(**{group: asked[group]} if group else {})
    found = SavedModel(str(tmp_path), 1, None, "text", None, 0.5, "k")
    monkeypatch.setattr("flatout.project.hooks.tracking.saved_model", lambda *_: found)
    folder, record = Mock(), SimpleNamespace(model=None, tags={}, status="FINISHED")
    folder.record, folder.path = record, tmp_path
    run = SimpleNamespace(tracked=folder, reused=False, settings=settings)
    hooks = TrackingHooks(run)
    hooks._catalog, hooks._program, hooks._described = Mock(), Mock(), None
    hooks._trained = Mock(), {}
    hooks.after_dataset_saved("model", Mock())
    assert bool(record.model) is (group is None)
    hooks._end("FINISHED", "finished")
    assert record.model == asdict(found)

    (tmp_path / "config.json").write_text("{}")
    saved_ns = newest_ns(tmp_path)
    Calibration(2.0).save(tmp_path)
    os.utime(tmp_path / CALIBRATION, ns=(2 * saved_ns, 2 * saved_ns))
    assert newest_ns(tmp_path) == saved_ns > 0
