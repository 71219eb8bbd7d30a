"""The guard's questions to a real store, and to one that hangs or refuses."""

from __future__ import annotations

import time

import pytest
from mlflow import MlflowClient

from flatout.engine.guard.comparison import RATE
from flatout.tracking import baseline
from flatout.tracking.baseline import NoAnswer, ask, earlier_runs, named_run


def tracked(client: MlflowClient, experiment: str, rate: float | None, **tags: str):
    run_id = client.create_run(experiment, tags=tags).info.run_id
    if rate is not None:
        client.log_metric(run_id, RATE, rate)
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
    with pytest.raises(NoAnswer, match="has no metric guard_samples_per_s"):
        named_run(client, without)


def test_a_store_that_hangs_or_refuses_costs_no_more_than_the_limit():
    with pytest.raises(NoAnswer, match=r"no answer within 0.05 s"):
        ask(lambda: time.sleep(5), 0.05)

    def login():
        raise PermissionError("401: log in first")

    with pytest.raises(NoAnswer, match=r"which runs it has \(401: log in first\)"):
        ask(login, 5)
    assert ask(lambda: "runs", 5) == "runs"
