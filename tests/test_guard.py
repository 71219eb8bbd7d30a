"""The guard's questions to a real store, and to one that hangs or refuses."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from flatout import tracking
from flatout.engine.guard.comparison import RATE
from flatout.engine.parameters import parse_settings
from flatout.project.guard_hooks import GuardHooks
from flatout.tracking import baseline, forwarder
from flatout.tracking.baseline import NoAnswer, ask, earlier_runs, named_run


def tracked(client: MlflowClient, experiment: str, rate: float | None, **tags: str):
    run_id = client.create_run(experiment, tags=tags).info.run_id
    if rate is not None:
        client.set_tag(run_id, RATE, str(rate))
    client.set_terminated(run_id)
    return run_id


def test_earlier_runs_are_finished_of_the_same_work_and_device(store, monkeypatch):
    """As many as are asked for, however many were faster on other devices."""
    monkeypatch.setattr(baseline, "MAX_RUNS", 3)
    client = MlflowClient(store)
    assert earlier_runs(client, "flatout", "k", "H200", None) == []
    experiment = client.create_experiment("flatout")
    own, slow, fast = (
        tracked(client, experiment, rate, work_key="k", device="H200")
        for rate in (300, 100, 200)
    )
    tracked(client, experiment, 900, work_key="k", device="another")
    tracked(client, experiment, 900, work_key="l", device="H200")
    client.create_run(experiment, tags={"work_key": "k", "device": "H200"})
    found = earlier_runs(client, "flatout", "k", "H200", own)
    assert [run.run_id for run in found] == [fast, slow]
    assert [run.samples_per_s for run in found] == [200, 100]


def test_a_named_baseline_must_be_a_training_with_a_rate(store):
    client = MlflowClient(store)
    experiment = client.create_experiment("flatout")
    named = tracked(client, experiment, 100, work_key="other work")
    assert named_run(client, named).samples_per_s == 100
    with pytest.raises(NoAnswer, match=r"guard.baseline: nothing is not in MLflow"):
        named_run(client, "nothing")
    without = tracked(client, experiment, None)
    with pytest.raises(NoAnswer, match="has no guard_samples_per_s"):
        named_run(client, without)


def test_a_store_that_hangs_or_refuses_costs_no_more_than_the_limit():
    with pytest.raises(NoAnswer, match=r"no answer within 0.05 s"):
        ask(lambda: time.sleep(5), 0.05)

    def login():
        raise PermissionError("401: log in first")

    with pytest.raises(NoAnswer, match=r"which runs it has \(401: log in first\)"):
        ask(login, 5)
    assert ask(lambda: "runs", 5) == "runs"


def test_a_store_that_is_slow_once_is_asked_again(store, tmp_path):
    """At most three times, each no longer than the limit."""
    points = tmp_path / "points.jsonl"
    metrics = {"train_samples_per_second": 300.0}
    line = {"time_s": time.time() + 60, "metrics": metrics}
    lines = [json.dumps({"step": step, **line}) for step in range(6)]
    points.write_text("\n".join(lines) + "\n")
    work = {"work_key": "k", "device": "H200"}
    record = tracking.RunRecord(store, "flatout", "now", str(tmp_path), tags=work)
    sends = SimpleNamespace(
        failing=False, watch=None, call=lambda *_: ask(lambda: time.sleep(5), 0.05)
    )
    outbox = SimpleNamespace(points=points, record=record)
    hooks = GuardHooks(SimpleNamespace(outbox=outbox, forwarder=sends))
    hooks._settings = parse_settings(
        {"model": {"config": {"model_type": "bert"}}, "guard": {"store_limit_s": 0.05}}
    )
    hooks._look_early(outbox)
    assert [sends.watch() for _ in range(3)] == [False, False, True]


def test_a_training_hears_that_it_is_slow_while_it_goes_on(
    store, tmp_path, monkeypatch, caplog
):
    """At its fifth window behind the warm-up; once, whatever comes later."""
    client = MlflowClient(store)
    experiment = client.create_experiment("flatout")
    work = {"work_key": "k", "device": "H200"}
    tracked(client, experiment, 1000.0, **work)
    monkeypatch.setattr(forwarder, "INTERVAL_S", 0.02)
    points = tmp_path / "points.jsonl"
    outbox = tracking.begin(
        points,
        tracking.RunRecord(store, "flatout", "now", str(tmp_path), tags=dict(work)),
        goes_on=False,
    )
    sends = tracking.Forwarder(outbox)
    hooks = GuardHooks(SimpleNamespace(outbox=outbox, forwarder=sends))
    hooks._settings = parse_settings({"model": {"config": {"model_type": "bert"}}})
    hooks._look_early(outbox)
    sends.start()
    for step in range(1, 9):
        rate = float("nan") if step == 1 else 300.0
        line = {"step": step, "time_s": time.time()}
        with points.open("a") as file:
            metrics = {"train_samples_per_second": rate}
            file.write(json.dumps({**line, "metrics": metrics}) + "\n")
        if step == 5:
            assert sends.flush() and sends.watch is not None
    while sends.watch is not None:
        assert sends.flush()
    assert sends.finish("FINISHED", 1)
    (text,) = [r.message for r in caplog.records if "windows: guard:" in r.message]
    assert "300 samples/s in the median window, 30 % of the baseline's 1000" in text
