"""The guard around a training: its baseline is a file, and it speaks twice."""

from __future__ import annotations

import json
import logging
import time

import pandas as pd
import pytest

from flatout.engine.guard import (
    SlowRunError,
    read_runs,
)
from flatout.engine.parameters import parse_settings
from flatout.project.guard import Guard
from flatout.tracking import RunFolder, RunRecord
from flatout.tracking.follow import Follower
from flatout.tracking.store import process_tags


@pytest.fixture
def training(tmp_path):
    """The guard of a tracked training that has begun, and its folder."""

    def begin(**guard):
        record = RunRecord(f"sqlite:///{tmp_path}/none.db", "flatout", "now")
        record.tags = {**process_tags(), "token_key": "t", "device": "H200"}
        record.points = str(tmp_path / "points.jsonl")
        folder = RunFolder(tmp_path / "runs" / "now", record)
        parameters = {"model": {"config": {"model_type": "bert"}}, "guard": guard}
        parameters["paths"] = {"metrics": str(tmp_path / "points.jsonl")}
        guarding = Guard(parse_settings(parameters))
        guarding.start(folder)
        return guarding, folder

    return begin


def ended(begun, rate: float) -> None:
    guarding, folder = begun
    guarding.trained(folder, pd.DataFrame({"samples_per_s": [rate] * 5}))
    guarding.ended()


def test_a_second_training_is_compared_with_the_first(training, tmp_path, caplog):
    ended(training(), 1000.0)
    begun = _, folder = training(on_slow="fail")
    with pytest.raises(SlowRunError, match="300 samples/s in the median window, 30 %"):
        ended(begun, 300.0)
    assert folder.record.tags["guard"] == "slow"
    assert folder.record.figures["guard_rate_pct"] == pytest.approx(30)
    verdict = json.loads((tmp_path / "guard.json").read_text())
    assert (verdict["state"], verdict["baseline"]) == ("slow", "now")
    states = [run.tags["guard"] for run in read_runs(tmp_path / "runs.jsonl")]
    assert states == ["first", "slow"]


def test_a_training_hears_that_it_is_slow_while_it_goes_on(training, tmp_path, caplog):
    """At its fifth window behind the warm-up; once, whatever comes later."""
    caplog.set_level(logging.WARNING)
    ended(training(), 1000.0)
    _, folder = training()
    follower = Follower(folder)
    with (tmp_path / "points.jsonl").open("w") as file:
        for step in range(1, 9):
            rate = float("nan") if step == 1 else 300.0
            metrics = {"train_samples_per_second": rate}
            line = {"step": step, "time_s": time.time(), "metrics": metrics}
            file.write(json.dumps(line) + "\n")
            file.flush()
            follower._warn_if_slow()
            assert ("windows: guard:" in caplog.text) == (step >= 6)
    (text,) = [r.message for r in caplog.records if "windows: guard:" in r.message]
    assert "300 samples/s in the median window, 30 % of the baseline's 1000" in text
