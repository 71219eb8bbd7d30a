"""`rows`: the rows of a step, the steps of a row, and rows that are left out."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flatout.engine.answers.row_steps import (
    largest_rise,
    row_lines,
    rows_of_steps,
    steps_of_row,
)
from flatout.engine.answers.step_check import verify
from flatout.engine.batches.global_batches import GlobalBatches, permute, unpermute
from flatout.engine.checkpoints.resume import resume_from
from flatout.engine.launch.launch import run_job
from flatout.engine.launch.results import load_finished_result
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.identity import identity
from flatout.engine.train.step import Stepper
from tests.engine.families import CONFIGS
from tests.engine.runs import CPU, NO_DROPOUT, crashed, make_job, metrics_of
from tests.make import task_job

EVERY_2 = {"checkpoint": {"every_steps": 2, "keep": 2}, "token_budget": 240}


@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1), st.integers(0, 9))
@settings(max_examples=60)
def test_the_inverse_finds_the_position_of_each_row(size, seed, epoch):
    positions = np.arange(size)
    images = permute(positions, size, seed, epoch)
    assert unpermute(images, size, seed, epoch).tolist() == positions.tolist()


def test_a_hundred_million_rows_cost_a_row():
    batches = GlobalBatches(10**8, 512, seed=3)
    for step in (0, 77_777, 5 * batches.steps_per_epoch + 9):
        rows = batches.rows(step)
        found = batches.steps_of(rows, batches.epoch(step))
        assert found.tolist() == [step] * len(rows)


@pytest.fixture
def seen(monkeypatch):
    """The rows of each executed step, by its number from 1."""
    found, right = {}, Stepper.__call__

    def noted(self, batch):
        found[batch.step + 1] = (batch.row_ids.tolist(), batch.divisor)
        right(self, batch)

    monkeypatch.setattr(Stepper, "__call__", noted)
    return found


def test_rows_of_a_run_that_was_resumed_twice(tmp_path, seen):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 3/12  loss")
    crashed(job, "step 9/12  loss")
    run_job(job)
    assert sorted(seen) == list(range(1, 13))
    for step, (rows, _) in seen.items():
        assert rows_of_steps(job, [step]) == [(row, step) for row in rows]
    for row in range(len(job.train)):
        expected = [step for step, (rows, _) in seen.items() if row in rows]
        assert steps_of_row(job, row) == sorted(expected)
    lines = row_lines(job, step=5, row=None, replays=True, most=3)
    assert lines[0] == "step 5: 16 rows" and lines[-1] == "and 13 more (--most)"
    assert lines[1] == "losses by the weights in best-000000004"
    losses = [float(line.split()[3]) for line in lines[3:6]]
    assert losses == sorted(losses, reverse=True)


def test_losses_are_replayed_from_a_checkpoint(tmp_path):
    """The mean over all rows is the loss that the training run logged for the step."""
    config = {**NO_DROPOUT, "initializer_range": 0.3}
    job = make_job(tmp_path, config=config, log_every=1, **EVERY_2)
    crashed(job, "step 8/12  loss")
    logged = metrics_of(job)["train_loss"]
    lines = row_lines(job, step=7, row=None, replays=True, most=50)
    assert lines[1] == "losses by the weights in step-000000006"
    losses = [float(line.split()[3]) for line in lines[3:]]
    assert np.mean(losses) == pytest.approx(logged[7], rel=1e-3)


def test_the_rows_behind_the_largest_rise(tmp_path):
    job = make_job(tmp_path)
    points = [(2, 1.0), (4, 1.2), (6, 0.9), (8, 2.5), (10, float("nan"))]
    lines = [
        json.dumps({"step": step, "metrics": {"train_loss": loss}})
        for step, loss in points[:4]
    ]
    job.metrics_file.write_text("\n".join([*lines, '{"step": 9, "met']))
    assert list(largest_rise(job.metrics_file)[0]) == [7, 8]
    told = row_lines(job, step=None, row=None, replays=False, most=50)
    assert told[0] == "loss 0.9000 at step 6, 2.5000 at step 8: 28 rows"
    expected = [*job.batches.rows(6), *job.batches.rows(7)]
    assert [int(line.split()[0]) for line in told[2:]] == expected
    assert "[a]" in " ".join(told) and told[2].split()[1] == "7"
    job.metrics_file.unlink()
    with pytest.raises(SettingsError, match="has no loss that rises"):
        largest_rise(job.metrics_file)


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("multi-label-classification", "a b"),
        ("regression", "8.42857"),
        ("reranking", "1"),
    ],
)
def test_labels_are_shown_before_the_text(tmp_path, task, label):
    config = {"model_type": "bert", **CONFIGS["bert"]}
    job = task_job(tmp_path, task, config)
    told = row_lines(job, step=None, row=59, replays=False, most=1)
    assert f" [{label}] 1 97 70 " in told[-1]


def test_questions_about_what_is_not_there(tmp_path):
    job = make_job(tmp_path)
    with pytest.raises(SettingsError, match="the run has the steps 1 to 12"):
        rows_of_steps(job, [13])
    with pytest.raises(SettingsError, match="are numbered 0 to 59"):
        row_lines(job, step=None, row=60, replays=False, most=5)
    with pytest.raises(SettingsError, match="no checkpoint and no model"):
        row_lines(job, step=1, row=None, replays=True, most=5)
    pairs = task_job(tmp_path, "embedding", {"model_type": "bert"})
    with pytest.raises(SettingsError, match="has no separate loss"):
        row_lines(pairs, step=1, row=None, replays=True, most=5)


def test_a_run_on_other_rows_is_told_apart(tmp_path):
    run_job(make_job(tmp_path, seed=3, max_steps=2))
    job = make_job(tmp_path)
    told = row_lines(job, step=1, row=None, replays=False, most=1)
    assert told[1] == "These are not the rows of the last run: runtime.seed: 3 -> 0"
    with pytest.raises(SettingsError, match=r"\(then -> now\): runtime.seed: 3 -> 0"):
        row_lines(job, step=1, row=None, replays=True, most=1)


def test_a_row_that_the_run_does_not_reach(tmp_path):
    job = make_job(tmp_path, max_steps=1)
    row = next(n for n in range(60) if n not in job.batches.rows(0))
    told = row_lines(job, step=None, row=row, replays=False, most=1)
    assert told[0].endswith("in no step: the run ends at step 1, before it")


def test_a_run_that_skipped_other_rows_is_told_apart(tmp_path):
    run_job(make_job(tmp_path, max_steps=2, skip_rows=[4]))
    told = row_lines(make_job(tmp_path), step=1, row=None, replays=False, most=1)
    assert told[1].endswith("the last run: skipped rows: [4] -> []")


# train.skip_rows


def test_rows_that_are_skipped_leave_all_others_where_they_are(tmp_path, seen):
    plain = make_job(tmp_path, max_steps=8)
    out = [3, 17, 44]
    job = make_job(tmp_path, max_steps=8, skip_rows=out)
    run_job(job)
    for step, (rows, divisor) in seen.items():
        before = plain.batches.rows(step - 1).tolist()
        assert rows == [row for row in before if row not in out]
        assert divisor == len(rows)
    assert steps_of_row(job, 17) == []
    assert "train.skip_rows leaves it out" in "".join(
        row_lines(job, step=None, row=17, replays=False, most=1)
    )
    assert verify(job, CPU).is_sound


@pytest.mark.parametrize("name", ["rows.txt", "rows.parquet"])
def test_a_file_names_the_rows_to_skip(tmp_path, name):
    path = tmp_path / name
    if name.endswith("txt"):
        path.write_text("5\n1\n5\n")
    else:
        pq.write_table(pa.table({"row": [5, 1, 5]}), path)
    assert make_job(tmp_path, skip_rows=str(path)).batches.skipped == (1, 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([60], "there is no row 60; the training rows are numbered 0 to 59"),
        (list(range(60)), "leaves no row in step 1: skip fewer"),
        ("no-such-file.txt", "cannot be read"),
        ("words.txt", "cannot be read .*number per line"),
        ("other.parquet", "cannot be read .*column row"),
    ],
)
def test_rows_that_cannot_be_skipped(tmp_path, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("five")
    pq.write_table(pa.table({"number": [5]}), "other.parquet")
    with pytest.raises(SettingsError, match=f"train.skip_rows.*{said}"):
        run_job(make_job(tmp_path, skip_rows=given))


def test_a_run_resumes_with_other_rows_to_skip_and_is_another_result(tmp_path, seen):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 9/12  loss")
    later = make_job(tmp_path, skip_rows=[int(job.batches.rows(10)[0])], **EVERY_2)
    assert resume_from("auto", job.work_folder, identity(later)) is not None
    run_job(later)
    assert (len(seen[11][0]), seen[11][1]) == (15, 15)
    assert load_finished_result(later) is not None
    assert load_finished_result(replace(job)) is None
