"""`train.audit` finds rows with wrong labels by how well they are learned."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flatout.engine.launch.launch import run_job
from flatout.engine.parameters import SettingsError
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.train.recording.audit import RowAudit, suspect_rows, write_audit
from flatout.engine.train.step import Stepper
from tests.engine import test_arrays, test_images
from tests.engine.families import CONFIGS
from tests.engine.plain import on_two_ranks
from tests.engine.runs import NO_DROPOUT, changed, curve, make_job
from tests.make import task_job

LEARNS = {
    "token_budget": 400,
    "learning_rate": 1e-2,
    "warmup_fraction": 0.0,
    "epochs": 4,
}


def easy_job(folder, rows=400, **train):
    """Return a job whose rows contain their class. Every 20th row has a wrong label."""
    chance = np.random.default_rng(3)
    true = chance.integers(0, 3, rows)
    filler = chance.integers(20, 100, (rows, 6))
    ids = [[1, 5 + c, *own, 2] for c, own in zip(true, filler.tolist(), strict=True)]
    labels = np.where(np.arange(rows) % 20 == 7, (true + 1) % 3, true)
    lists = pa.array(ids, pa.list_(pa.int32()))
    table = pa.table({"input_ids": lists, "labels": labels})
    job = make_job(folder, config=NO_DROPOUT, **{"audit": True, **LEARNS, **train})
    return replace(job, train=TokenRows(table)), np.flatnonzero(labels != true)


def found_in(job):
    path = job.metrics_file.with_name("suspect_rows.parquet")
    return pq.read_table(path).to_pandas()


def test_wrong_labels_are_the_worst_rows(tmp_path):
    job, wrong = easy_job(tmp_path)
    run_job(job)
    found = found_in(job)
    worst = found.head(len(wrong))
    assert len(set(worst["row"]) & set(wrong)) >= 0.8 * len(wrong)
    assert found["score"].is_monotonic_decreasing
    first = found.iloc[0]
    assert first["kind"] == "probably mislabelled" and first["passes"] == 4
    assert first["label"] != first["likely_label"]
    page = job.metrics_file.with_name("suspect_rows.md").read_text()
    assert page.count("\n| ") == min(len(found), 50) + 2
    assert f"| {first['row']} | probably mislabelled | 1 " in page
    path = str(job.metrics_file.with_name("suspect_rows.parquet"))
    skipping = changed(job, train={"skip_rows": path})
    assert set(found["row"]) == {*skipping.batches.skipped}


def test_the_audit_changes_no_bit_of_the_training(tmp_path):
    short = {"rows": 60, "token_budget": 80, "epochs": 2, "evaluate_every": None}
    job, _ = easy_job(tmp_path / "one", **short)
    plain, _ = easy_job(tmp_path / "other", **short, audit=False)
    assert curve(run_job(job)) == curve(run_job(plain))


@pytest.mark.parametrize("batching", ["packed", "random", "fixed"])
def test_each_row_is_seen_once_a_pass(tmp_path, monkeypatch, batching):
    kept = []
    right = Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda s: (kept.append(s.audit), right(s)))
    job = make_job(tmp_path, audit=True, batching=batching, epochs=2)
    run_job(job)
    assert kept[-1].seen[:-1].tolist() == [2] * len(job.train)


@pytest.mark.parametrize("method", ["_forward_backward", "update"])
def test_a_step_that_lacked_memory_is_counted_once(tmp_path, monkeypatch, method):
    """Memory runs out in the second micro-batch, or in the update of the step."""
    audits, right = [], getattr(Stepper, method)

    def full_once(self, *tensors, **options):
        audits.append(self.audit)
        if len(audits) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return right(self, *tensors, **options)

    monkeypatch.setattr(Stepper, method, full_once)
    job = make_job(tmp_path, audit=True, on_oom="shrink", token_budget=60, epochs=2)
    run_job(job)
    assert audits[0].seen[:-1].tolist() == [2] * len(job.train)


@pytest.mark.parametrize("module", [test_arrays, test_images])
def test_samples_are_audited_too(tmp_path, module):
    job = module.job_of(tmp_path)
    run_job(changed(job, train={"audit": True, "epochs": 2}))
    found = found_in(job)
    assert set(found["passes"]) <= {2} and found["text"].map(len).min() > 0


@pytest.mark.process
def test_two_ranks_see_the_rows_of_one(tmp_path):
    job = make_job(tmp_path / "two", audit=True, config=NO_DROPOUT, **LEARNS)
    alone = make_job(tmp_path / "one", audit=True, config=NO_DROPOUT, **LEARNS)
    on_two_ranks({"curve": job}, tmp_path)
    run_job(alone)
    one, two = found_in(alone), found_in(job)
    assert one["passes"].tolist() == two["passes"].tolist() and len(one)
    assert one["row"].tolist() == two["row"].tolist()
    assert one["score"].to_numpy() == pytest.approx(two["score"].to_numpy(), rel=1e-3)


def test_margins_and_kinds_of_rows(tmp_path):
    """The 5 rows are learned, from another class, from several classes, uncertain, and
    padding."""
    job = make_job(tmp_path, rows=4)
    labels = job.train.labels_of(np.arange(4)).tolist()
    audit, numbers = RowAudit(4, torch.device("cpu")), torch.tensor([0, 1, 2, 3, 4])
    for turn in range(3):
        logits = torch.zeros(5, 3)
        logits[0, labels[0]] = 2.0
        logits[1, (labels[1] + 1) % 3] = 3.0
        logits[2, (labels[2] + 1 + turn % 2) % 3] = 1.0
        logits[3, labels[3] if turn == 1 else (labels[3] + 1) % 3] = 1.0
        audit.add(numbers, logits, torch.tensor([*labels, -100]))
    sums = audit.gathered(1)
    assert sums[2].tolist() == [6.0, -9.0, -3.0, -1.0]
    found = suspect_rows(job, sums).to_pylist()
    assert [(row["row"], row["kind"]) for row in found] == [
        (1, "probably mislabelled"),
        (2, "never learnt"),
        (3, "ambiguous"),
    ]
    assert found[0]["score"] == 3.0
    assert found[0]["likely_label"] == "abc"[(labels[1] + 1) % 3]


def test_equal_rows_of_two_labels_are_named(tmp_path):
    ids = pa.array([[1, 7, 2], [1, 8, 2], [1, 7, 2]], pa.list_(pa.int32()))
    rows = TokenRows(pa.table({"input_ids": ids, "labels": [0, 1, 2]}))
    job = replace(make_job(tmp_path), train=rows)
    found = suspect_rows(job, np.zeros((5, 3))).to_pylist()
    assert [row["row"] for row in found] == [0, 2]
    assert {row["kind"] for row in found} == {"duplicate with another label"}
    assert found[0]["text"] == "1 7 2" and found[0]["likely_label"] is None


def test_the_first_pass_is_like_no_pass_before():
    audit, row = RowAudit(1, torch.device("cpu")), torch.tensor([0])
    for likely in (0, 1, 1):
        audit.add(row, torch.eye(3)[[likely]], torch.tensor([2]))
    assert audit.steady[0] == 1


@pytest.mark.parametrize("learnt", [True, False])
def test_a_model_that_learnt_little_is_no_judge_of_labels(tmp_path, caplog, learnt):
    caplog.set_level("INFO")
    job = make_job(tmp_path)
    audit, rows = RowAudit(len(job.train), torch.device("cpu")), len(job.train)
    labels = torch.from_numpy(job.train.labels_of(np.arange(rows)))
    likely = labels if learnt else torch.zeros_like(labels)
    for _ in range(3):
        audit.add(torch.arange(rows), torch.eye(3)[likely], labels)
    write_audit(job, audit.gathered(1))
    assert ("fits too few rows for an audit" in caplog.messages[-1]) != learnt
    assert ("set split.drop_rows to" in caplog.messages[-1]) == learnt


@pytest.mark.parametrize("task", ["masked-lm", "regression", "token-classification"])
def test_tasks_without_one_class_per_row_are_refused(tmp_path, task):
    config = {"model_type": "bert", **CONFIGS["bert"]}
    with pytest.raises(SettingsError, match=f"train.audit: rows of {task} do not have"):
        run_job(task_job(tmp_path, task, config, audit=True))
