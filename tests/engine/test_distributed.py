"""The same training on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flatout.engine.batching import Planner
from flatout.engine.environment import Ranks
from flatout.engine.jobs.distributed import Agreement, Decision, differing
from flatout.engine.jobs.launch import run_job
from flatout.engine.model import load_pretrained
from tests.engine.families import gradient, step_rows, task_model
from tests.engine.runs import NO_DROPOUT, make_job

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


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    result = run_job(make_job(folder, config=NO_DROPOUT, log_every=1))
    return result, load_file(result.last_model_folder / "model.safetensors")


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_does(tmp_path, one_rank, strategy):
    """Losses, gradient norms, weights and figures; the model loads by itself."""
    distributed = {"num_processes": 2, "strategy": strategy}
    job = make_job(tmp_path, config=NO_DROPOUT, log_every=1, distributed=distributed)
    result = run_job(job)
    expected, weights = one_rank
    assert result.report.world_size == 2
    assert result.report.samples == expected.report.samples
    for point, other in zip(result.history, expected.history, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
        assert point.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    found = load_file(result.last_model_folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    assert load_pretrained(result.model_folder).num_labels == 3
    assert result.report.test_loss == pytest.approx(expected.report.test_loss, 1e-4)


def test_alone_a_rank_agrees_with_itself_at_every_step():
    agreement = Agreement(Ranks(), None, every_steps=5)
    assert all(agreement.is_due(done) for done in range(1, 8))
    assert agreement.reach(3, 15, True) == Decision(15, True)


def test_differences_are_named_with_both_values():
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b: 2 -> 3"]


def test_a_setting_added_later_with_the_default_none_is_no_difference():
    assert differing({"a": 1}, {"a": 1, "new": None}) == []
