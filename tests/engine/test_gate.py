"""`gate` detects training runs that are slower or worse than a baseline."""

import json
import time
from dataclasses import replace

import pytest

from flatout.engine.answers import gate
from flatout.engine.answers.gate import Measured, check_comparable, judge, measure
from flatout.engine.parameters import SettingsError
from flatout.engine.train.step import Stepper
from tests.engine.test_audit import easy_job

BASE = Measured(
    steps=100,
    rates=[1000.0, 980.0, 990.0],
    losses=[0.50, 0.52, 0.51],
    params={"train.learning_rate": "0.001"},
    tags={"device": "CPU", "world_size": "1", "token_key": "k", "version.torch": "2.1"},
)


def job_of(folder, **train):
    """Return a job with 64 rows, which are also the validation rows."""
    job = easy_job(folder, rows=64, audit=False, **train)[0]
    return replace(job, validation=job.train)


def test_a_broken_rate_of_learning_and_a_slow_step_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "RUNS", 1)
    before = measure(job_of(tmp_path), 30)
    now = measure(job_of(tmp_path), 30)
    check_comparable(now.conditions, before)
    assert now.losses == before.losses and now.params == before.params
    assert not list(tmp_path.iterdir())
    broken = measure(job_of(tmp_path, learning_rate=1e-9), 30)
    told = " ".join(judge(broken.model_copy(update={"rates": before.rates}), before)[1])
    assert "the validation loss is" in told
    assert "differences: train.learning_rate: 0.01 -> 1e-09" in told
    right = Stepper.__call__

    def slow(self, batch):
        begin_s = time.process_time()
        right(self, batch)
        end_s = time.process_time()
        while time.process_time() < end_s + end_s - begin_s:
            pass

    monkeypatch.setattr(Stepper, "__call__", slow)
    told = " ".join(judge(measure(job_of(tmp_path), 30), before)[1])
    assert "% of the baseline's" in told and "no setting or package" in told


@pytest.mark.parametrize(
    ("rates", "losses", "is_fault"),
    [
        ([930.0, 910.0, 960.0], [0.51] * 3, False),
        ([850.0, 930.0, 700.0], [0.51] * 3, False),  # as noisy as slower
        ([500.0, 200.0, 100.0], [0.51] * 3, False),  # too noisy to be compared
        ([800.0, 790.0, 795.0], [0.51] * 3, True),
        ([1500.0] * 3, [0.3] * 3, False),
        ([1000.0] * 3, [0.53] * 3, False),
        ([1000.0] * 3, [0.60] * 3, True),
        ([1000.0] * 3, [float("nan")] * 3, True),
    ],
)
def test_noise_is_no_fault(rates, losses, is_fault):
    now = BASE.model_copy(update={"rates": rates, "losses": losses})
    told, faults = judge(now, BASE)
    assert bool(faults) == is_fault
    assert ("not compared" in told) == (rates[0] == 500)


def test_a_package_that_differs_is_named():
    tags = {**BASE.tags, "version.torch": "2.2"}
    now = BASE.model_copy(update={"rates": [1.0], "tags": tags})
    assert judge(now, BASE)[1][-1] == "differences: version.torch: 2.1 -> 2.2"


def test_baselines_of_no_use_are_refused(tmp_path):
    path = tmp_path / "new" / "gate.json"
    with pytest.raises(SettingsError) as missing:
        Measured.read(path)
    assert str(missing.value) == (
        f"--baseline: {path} cannot be read (No such file or directory): make it on "
        "this machine with --write, and commit it"
    )
    BASE.write(path)
    assert Measured.read(path) == BASE
    for change in ({"rates": []}, {"losses": "0.5"}, {"rates": [0.0]}, {"tags": 3}):
        path.write_text(json.dumps({**BASE.model_dump(), **change}))
        (name,) = change
        with pytest.raises(SettingsError, match=rf"cannot be read .*{name}.*--write"):
            Measured.read(path)
    tags = {**BASE.tags, "device": "H100"}
    other = BASE.model_copy(update={"steps": 50, "tags": tags})
    told = "--steps: 50 -> 100; device: 'H100' -> 'CPU'"
    with pytest.raises(SettingsError, match=told):
        check_comparable(BASE.conditions, other)
    with pytest.raises(SettingsError, match="too few for a window"):
        measure(job_of(tmp_path), 2)
