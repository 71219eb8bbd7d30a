"""The guard compares a run with its baseline during the training."""

import json
import logging
import time
from pathlib import Path

import pandas as pd

from flatout.engine.parameters import parse_settings
from flatout.project.guard import Guard
from flatout.tracking import RunFolder, RunRecord
from flatout.tracking.follow import Follower
from flatout.tracking.store import process_tags


def begun(folder: Path) -> tuple[Guard, RunFolder]:
    """Return the guard of a tracked training run that has begun, and the run's
    folder."""
    points = str(folder / "points.jsonl")
    record = RunRecord(f"sqlite:///{folder}/none.db", "flatout", "now")
    record.tags = {**process_tags(), "token_key": "t", "device": "H200"}
    record.points = points
    model = {"config": {"model_type": "bert"}}
    guarding = Guard(parse_settings({"model": model, "paths": {"metrics": points}}))
    guarding.start(run := RunFolder(folder / "runs" / "now", record))
    return guarding, run


def test_a_training_hears_that_it_is_slow_while_it_goes_on(tmp_path, caplog):
    """The warning appears once, at the fifth window after the warm-up."""
    caplog.set_level(logging.WARNING)
    first, folder = begun(tmp_path)
    first.trained(folder, pd.DataFrame({"samples_per_s": [1000.0] * 5}))
    first.ended()
    _, folder = begun(tmp_path)
    follower = Follower(folder)
    with (tmp_path / "points.jsonl").open("w") as file:
        for step in range(1, 9):
            metrics = {"train_samples_per_second": 300.0} if step > 1 else {}
            line = {"step": step, "time_s": time.time(), "metrics": metrics}
            file.write(json.dumps(line) + "\n")
            file.flush()
            follower._warn_if_slow()
            assert ("windows: guard:" in caplog.text) == (step >= 6)
    (text,) = [r.message for r in caplog.records if "windows: guard:" in r.message]
    assert "300 samples/s in the median window, 30 % of the baseline's 1000" in text
