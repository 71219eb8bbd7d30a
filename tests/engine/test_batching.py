"""Global batches and plans, computed from row numbers and lengths only."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from flatout.engine.batches.global_batches import (
    BudgetError,
    GlobalBatches,
    Planner,
    cheapest_cuts,
    greedy_cuts,
    permute,
    quickest_cuts,
)
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.flops import launch_tokens
from flatout.engine.rows.layout import Layout

STRATEGIES = ["fixed", "random", "grouped", "packed"]


@given(
    st.integers(1, 500),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.integers(0, 9),
)
@settings(max_examples=60)
def test_an_epoch_holds_every_row_once(num_rows, batch_size, seed, epoch):
    batches = GlobalBatches(num_rows, batch_size, seed)
    first = epoch * batches.steps_per_epoch
    steps = range(first, first + batches.steps_per_epoch)
    rows = np.concatenate([batches.rows(step) for step in steps])
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_rows_are_a_function_of_seed_and_step():
    batches = GlobalBatches(10, 4, seed=1)
    assert batches.rows(0).tolist() == GlobalBatches(10, 4, seed=1).rows(0).tolist()
    # Stored values: a change of the order would break every resumed run.
    assert [batches.rows(step).tolist() for step in range(3)] == EXPECTED_ORDER
    assert batches.rows(3).tolist() != batches.rows(0).tolist()
    assert GlobalBatches(10, 4, seed=2).rows(0).tolist() != batches.rows(0).tolist()
    # Use as many rows as there are numbers with that many bits.
    assert GlobalBatches(16, 16, seed=1).rows(0).tolist() == ORDER_OF_16


EXPECTED_ORDER = [[6, 9, 1, 8], [2, 3, 7, 0], [4, 5]]
ORDER_OF_16 = [6, 9, 1, 8, 2, 3, 12, 14, 4, 10, 15, 5, 7, 11, 0, 13]


def test_billions_of_rows_cost_a_batch():
    rows = GlobalBatches(10**11, 1024, seed=3).rows(77_777_777)
    assert rows.shape == (1024,)
    assert len(set(rows.tolist())) == 1024
    assert 0 <= rows.min() and rows.max() < 10**11


def test_permutation_is_spread_evenly():
    images = permute(np.arange(4096), 2**20, seed=5, epoch=0)
    counts, _ = np.histogram(images, bins=16, range=(0, 2**20))
    assert counts.min() > 200 and counts.max() < 320  # 256 expected, 4 deviations


@pytest.mark.parametrize(("num_rows", "batch_size"), [(9_000, 13), (20_000, 9_001)])
def test_steps_are_parts_of_one_permutation(num_rows, batch_size):
    """Some steps span several of the blocks that the permutation is computed in."""
    batches = GlobalBatches(num_rows, batch_size, seed=4)
    whole = permute(np.arange(num_rows), num_rows, seed=4, epoch=1)
    first = batches.steps_per_epoch
    for index in (0, 314, 315, 316, first - 1):
        if index < first:
            part = slice(index * batch_size, (index + 1) * batch_size)
            assert batches.rows(first + index).tolist() == whole[part].tolist()


def test_total_steps_rounds_a_fraction_up():
    batches = GlobalBatches(10, 4, seed=0)
    assert batches.steps_per_epoch == 3
    assert batches.total_steps(2) == 6
    assert batches.total_steps(0.5) == 2
    tenths = GlobalBatches(10_000, 1_000, seed=0)
    assert tenths.total_steps(0.1 + 0.2) == 3  # ten times it is 3.0000000000000004
    assert tenths.total_steps(0.3 + 1e-6) == 4


def test_steps_that_are_set_win_over_epochs():
    """This is the behaviour of `max_steps` in transformers' Trainer."""
    batches = GlobalBatches(10, 4, seed=0)
    assert batches.total_steps(2, max_steps=5) == 5
    assert batches.total_steps(1, max_steps=40) == 40


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80),
    st.sampled_from(STRATEGIES),
    st.sampled_from([1, 2, 4]),
    st.integers(64, 400),
)
@settings(max_examples=200)
def test_plans_hold_every_row_once_within_the_budget(lengths, strategy, world, budget):
    lengths = np.array(lengths)
    plan = Planner(strategy, budget, 64, world).plan(lengths)
    rows = [row for rank in plan for own in rank for row in own.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for own in (own for rank in plan for own in rank if len(own)):
        if strategy == "packed":
            assert lengths[own].sum() <= budget
        else:
            width = 64 if strategy == "fixed" else lengths[own].max()
            assert len(own) * width <= budget


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(30, 120),
    st.integers(0, 60),
)
@settings(max_examples=100)
def test_the_cheapest_cuts_are_the_cheapest_of_all(lengths, budget, overhead):
    falling = np.array(sorted(lengths, reverse=True))
    inner = range(1, len(falling))
    ends = [
        (0, *chosen, len(falling))
        for count in range(len(falling))
        for chosen in combinations(inner, count)
    ]

    def cost(cuts):
        tokens = [(b - a) * int(falling[a]) for a, b in cuts]
        return np.inf if max(tokens) > budget else sum(tokens) + overhead * len(cuts)

    found = cheapest_cuts(falling, budget, overhead)
    assert cost(found) == min(cost(list(pairwise(places))) for places in ends)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]


def test_packed_ranks_get_nearly_the_same_tokens():
    lengths = np.random.default_rng(0).integers(5, 321, 512)
    plan = Planner("packed", 8192, 320, 4).plan(lengths)
    tokens = [sum(int(lengths[own].sum()) for own in rank) for rank in plan]
    assert max(tokens) - min(tokens) <= 320
    assert sum(tokens) == lengths.sum()


def test_grouped_pads_less_than_random_and_packed_not_at_all():
    lengths = np.random.default_rng(1).integers(5, 321, 256)
    padded = {}
    for strategy in STRATEGIES:
        planner = Planner(strategy, 4096, 320)
        plan = planner.plan(lengths)
        assert len(plan) == 1  # one rank, unless a number is given
        layout = Layout(
            packed=strategy == "packed",
            pad_to_length=320 if strategy == "fixed" else None,
        )
        padded[strategy] = sum(
            layout.num_padded_tokens(lengths[own]) for own in plan[0]
        )
    assert padded["packed"] == lengths.sum()
    assert padded["packed"] < padded["grouped"] < padded["random"] < padded["fixed"]
    assert padded["fixed"] == 256 * 320


def test_cuts():
    lengths = np.array([10, 10, 4, 4, 4, 1])
    assert greedy_cuts(lengths, 20) == [(0, 2), (2, 6)]
    # If a run costs 1, 20 + 12 + 1 tokens in three runs beat 20 + 16 tokens in two.
    assert cheapest_cuts(lengths, 20, overhead=1) == [(0, 2), (2, 5), (5, 6)]
    assert cheapest_cuts(lengths, 20, overhead=5) == [(0, 2), (2, 6)]


def test_where_the_host_is_slower_there_are_fewer_cuts():
    lengths = np.array([10, 10, 4, 4, 4, 1])
    # Three runs take 36 tokens on the device, and three launches on the host.
    assert quickest_cuts(lengths, 40, overhead=1, launch=0) == [(0, 2), (2, 5), (5, 6)]
    assert quickest_cuts(lengths, 40, overhead=1, launch=12) == [(0, 2), (2, 5), (5, 6)]
    # 38 tokens in two runs beat 3 launches of 14, and 61 tokens in one run beat 2 of
    # 40.
    assert quickest_cuts(lengths, 60, overhead=1, launch=14) == [(0, 2), (2, 6)]
    assert quickest_cuts(lengths, 60, overhead=1, launch=40) == [(0, 6)]
    # The budget is respected, however much time the host needs.
    assert quickest_cuts(lengths, 20, overhead=1, launch=99) == [(0, 2), (2, 6)]


def test_launching_bert_base_costs_what_was_measured():
    # The host needs 2.2 ms per block. The device's time is quadratic in the width.
    def tokens(width=768, name="NVIDIA H200", precision="bf16", device="cuda"):
        gpu = Runtime(torch.device(device), name, precision, Ranks(), threads=1)
        return launch_tokens(width, gpu)

    assert tokens() == 25_630
    assert tokens(384, precision="fp16") == 4 * 25_630 + 1
    assert tokens(precision="fp32") == 0
    assert tokens(name="NVIDIA something new") == 0
    assert tokens(name="AMD A10-7850K", device="cpu") == 0


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(BudgetError, match="a row of 50 tokens does not fit"):
        Planner("packed", 40, 64).plan(np.array([3, 50]))
