"""The same training on any number of ranks."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from flatout.engine.batching import GlobalBatches, Planner
from flatout.engine.environment import Ranks
from flatout.engine.jobs.checkpoint_folder import (
    file_hash,
    read_manifest,
    step_folders,
)
from flatout.engine.jobs.distributed import Agreement, Decision, differing
from flatout.engine.jobs.launch import run_job
from flatout.engine.step import Stepper
from tests.engine.families import gradient, step_rows, task_model
from tests.engine.runs import NO_DROPOUT, curve, make_job, when_logged

STRATEGIES = ["fixed", "random", "grouped", "packed"]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(STRATEGIES),
)
def test_every_row_of_a_step_goes_to_one_rank_once(lengths, world_size, strategy):
    planner = Planner(strategy, 128, 64, world_size)
    plan = planner.plan(np.array(lengths))
    assert len(plan.micro_batches) == world_size
    dealt = [row for rank in plan.micro_batches for micro in rank for row in micro]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan.micro_batches}) == 1  # collectives match


@given(st.lists(st.integers(1, 320), min_size=64, max_size=256))
def test_packed_ranks_get_nearly_the_same_number_of_tokens(lengths):
    rows = np.array(lengths)
    plan = Planner("packed", 4096, 320, 4).plan(rows)
    tokens = [sum(int(rows[m].sum()) for m in rank) for rank in plan.micro_batches]
    longest = int(rows.max())
    assert max(tokens) - min(tokens) <= longest * plan.num_micro_batches


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_and_gradients_of_a_step_do_not_depend_on_the_ranks(strategy, world_size):
    family, task = "bert", "sequence-classification"
    model = task_model(family, task, "sdpa")
    kernel = "flatout_packed" if strategy == "packed" else "sdpa"
    model.model.set_attn_implementation(kernel)
    alone = step_rows(family, task, strategy, token_budget=100)
    for step in (0, 1, 3):  # the last batch of an epoch is a short one
        one = alone[step]
        shares = [
            step_rows(
                *(family, task, strategy),
                world_size=world_size,
                rank=rank,
                token_budget=100,
            )[step]
            for rank in range(world_size)
        ]
        assert all(share.row_ids.tolist() == one.row_ids.tolist() for share in shares)
        loss, expected = gradient(model, [one])
        split_loss, found = gradient(model, shares)
        assert split_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


OFTEN = {"every_steps": 2, "keep": 9}


def keep_checkpoint(job, kept):
    """The newest one so far, to go on from it later."""
    shutil.copytree(step_folders(job.work_folder)[0], kept)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A run, its weights, and a checkpoint of its first half."""
    folder = tmp_path_factory.mktemp("one")
    job = make_job(folder, config=NO_DROPOUT, log_every=1, checkpoint=OFTEN)
    kept = folder / "kept"
    with when_logged("step 6/12  loss", lambda: keep_checkpoint(job, kept)):
        result = run_job(job)
    return result, load_file(result.last_model_folder / "model.safetensors"), kept


def two_ranks(folder, strategy, **train):
    # Buckets of 25 MiB are the default, which other tests and the drill have.
    distributed = {"num_processes": 2, "strategy": strategy, "bucket_mib": "all"}
    return make_job(
        folder,
        config=NO_DROPOUT,
        log_every=1,
        checkpoint=OFTEN,
        distributed=distributed,
        **train,
    )


def check_equal(result, one_rank) -> None:
    """Losses, gradient norms, weights and figures; the model loads by itself."""
    expected, weights, _ = one_rank
    assert result.report.world_size == 2
    for point, other in zip(result.history, expected.history, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
        assert point.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    found = load_file(result.last_model_folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    assert result.report.test_loss == pytest.approx(expected.report.test_loss, 1e-4)
    model = AutoModelForSequenceClassification.from_pretrained(result.model_folder)
    assert model.num_labels == 3


@pytest.mark.process
@pytest.mark.timeout(120)
def test_two_ranks_go_on_from_a_checkpoint_of_one_as_one_does(tmp_path, one_rank):
    kept = one_rank[2]
    result = run_job(two_ranks(tmp_path, "ddp", resume=str(kept)))
    assert result.report.resumed_from_step == read_manifest(kept).step in range(2, 7)
    check_equal(result, one_rank)


@pytest.mark.process
@pytest.mark.timeout(180)
def test_two_ranks_with_sharded_weights_train_what_one_does(tmp_path, one_rank):
    """And go on from their checkpoint bit for bit."""
    job, kept = two_ranks(tmp_path / "whole", "fsdp"), tmp_path / "kept"
    keeper = threading.Thread(target=keep_first_checkpoint, args=(job, kept))
    keeper.start()
    whole = run_job(job)
    keeper.join()
    assert whole.report.samples == one_rank[0].report.samples
    check_equal(whole, one_rank)
    manifest = read_manifest(kept)
    assert manifest.world_size == 2
    again = run_job(two_ranks(tmp_path / "again", "fsdp", resume=str(kept)))
    assert again.report.resumed_from_step == manifest.step in range(2, 12)
    assert curve(again) == curve(whole)
    files = [r.last_model_folder / "model.safetensors" for r in (again, whole)]
    assert file_hash(files[0]) == file_hash(files[1])
    check_one_rank_goes_on(tmp_path / "alone", kept, one_rank)


def check_one_rank_goes_on(folder, kept, one_rank) -> None:
    """From a checkpoint of two: the rows of each step, and the losses."""
    expected, rows = one_rank[0], {}
    resume = {"resume": str(kept), "log_every": 1}
    job = make_job(folder, config=NO_DROPOUT, checkpoint=OFTEN, **resume)
    stepped = Stepper.__call__

    def noted(self, batch):
        rows[batch.step] = batch.row_ids.tolist()
        stepped(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "__call__", noted)
        result = run_job(job)
    batches = GlobalBatches(60, 16, job.settings.runtime.seed)
    steps = range(read_manifest(kept).step, 12)
    assert rows == {step: batches.rows(step).tolist() for step in steps}
    losses = [point.loss for point in result.history]
    assert losses == pytest.approx([p.loss for p in expected.history], rel=1e-5)


def keep_first_checkpoint(job, kept):
    while not step_folders(job.work_folder):
        time.sleep(0.01)
    keep_checkpoint(job, kept)


def test_alone_a_rank_agrees_with_itself_at_every_step():
    agreement = Agreement(Ranks(), None, every_steps=5)
    assert all(agreement.is_due(done) for done in range(1, 8))
    assert agreement.reach(3, 15, True) == Decision(15, True)


def test_differences_are_named_with_both_values():
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b: 2 -> 3"]


def test_a_setting_added_later_with_the_default_none_is_no_difference():
    assert differing({"a": 1}, {"a": 1, "new": None}) == []
