"""How many tokens fit into a GPU's memory: exact values, and passes without side
effects."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import BertConfig, BertForSequenceClassification

from flatout.engine.batches.global_batches import Planner
from flatout.engine.machine import runtime as runtimes
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.memory import (
    GIB,
    Demand,
    estimate,
    guessed_tokens,
    line,
    moment_bytes,
    rounded_down,
)
from flatout.engine.parameters import Settings
from flatout.engine.train.optimizer import build_optimizer
from flatout.engine.train.setup import assemble as assembling
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.budgets import (
    Bounds,
    Fit,
    choose_budget,
    combine_ranks,
    fit_from_estimate,
    is_plenty,
    points,
)
from flatout.engine.train.setup.memory_fit import (
    Passes,
    bounds_of,
    longest_rows,
    preserve_state,
)
from tests.engine.families import CONFIGS
from tests.engine.runs import make_job

MIB = 2**20
BERT = Demand(
    held=440 * MIB,
    gradients=420 * MIB,
    moments=840 * MIB,
    update=0,
    fixed=200.0 * MIB,
    per_token=1.0 * MIB,
)
"""Memory of a model of BERT-base's size, in which a token takes 1 MiB."""
BOUNDS = Bounds(least=512, most=8_192)
WANTED = 65_536


def test_a_step_takes_what_is_held_and_a_pass_or_an_update():
    assert BERT.peak(1_000) == (440 + 840 + 420 + 1_200) * MIB
    unfused = Demand(440, 420, 840, update=420, fixed=0, per_token=1)
    assert unfused.peak(100) == 440 + 840 + 840


@given(st.integers(1, 10**6))
def test_the_most_tokens_fit_and_more_do_not(tokens):
    room = BERT.peak(tokens)
    most = BERT.most_tokens(room)
    assert most == pytest.approx(tokens, abs=1)
    assert BERT.peak(most) <= room + 1


def test_nothing_fits_where_states_do_not():
    assert BERT.most_tokens(1.6 * GIB) == 0
    assert BERT.most_tokens(1.7 * GIB) == 0  # nor the memory of a pass without tokens
    assert BERT.most_tokens(2 * GIB) == 2_048 - 1_900


def test_a_line_goes_through_the_last_two_points():
    assert line([(10, 99.0), (100, 300.0), (200, 500.0)]) == (100.0, 2.0)
    assert line([(100, 300.0)]) == (0.0, 3.0)
    assert line([(100, 300.0), (200, 290.0)]) == (290.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "rounded"),
    [
        *((5, 5), (8, 8), (17, 16), (300, 288), (1_023, 960), (1_024, 1_024)),
        *((1_151, 1_024), (1_152, 1_152), (16_383, 15_360), (65_536, 65_536)),
    ],
)
def test_budgets_are_eighths_between_powers_of_two(tokens, rounded):
    assert rounded_down(tokens) == rounded
    assert rounded_down(tokens, least=400) == max(400, rounded)


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_weight"),
    [("adamw", 8), ("sgd", 4), ("adafactor", 0)],
)
def test_moments_are_those_that_pytorch_keeps(optimizer, bytes_a_weight):
    model = torch.nn.Linear(64, 64)
    settings = Settings(train={"optimizer": optimizer}).train
    made = build_optimizer(model, settings, fused=False, capturable=False)
    model(torch.ones(2, 64)).sum().backward()
    made.step()
    kept = [v for state in made.state.values() for v in state.values()]
    kept_bytes = sum(v.nbytes for v in kept if torch.is_tensor(v) and v.dim())
    found = moment_bytes(made.param_groups)
    assert found == bytes_a_weight * (64 * 64 + 64)
    assert found == pytest.approx(kept_bytes, abs=1_000)  # rows and columns of one


def test_plenty_of_memory_leaves_the_budget_alone():
    found = choose_budget(BERT, BOUNDS, 80 * GIB, WANTED)
    assert found.token_budget == 65_536
    assert found.reason == (
        "token budget 65,536: steps need about 9.9 of the 80.0 GiB of GPU memory "
        "within reach"
    )


def test_a_small_card_has_a_smaller_budget():
    # 0.9 x 6 GiB - 1,700 MiB for states - 200 MiB for a pass leaves 3,629 tokens.
    found = choose_budget(BERT, BOUNDS, 6 * GIB, WANTED)
    assert found.token_budget == 3_584
    assert BERT.peak(3_584) <= 0.9 * 6 * GIB
    assert "token budget 3,584: steps need about 5.4 of the 6.0 GiB" in found.reason


def test_a_row_that_does_not_fit_is_refused():
    found = choose_budget(None, BOUNDS, 2 * GIB, WANTED)
    assert found.fault == (
        "one row of 512 tokens does not fit in the 2.0 GiB of GPU memory within reach: "
        "set train.gradient_checkpointing: true, lower tokenize.max_length, or use a "
        "smaller model"
    )


def test_a_model_whose_states_alone_are_too_large_is_refused_on_all_ranks():
    # 1,700 MiB for weights, gradients and moments.
    assert not choose_budget(BERT, BOUNDS, 1_701 * MIB, WANTED).fault
    found = choose_budget(BERT, BOUNDS, 1_699 * MIB, WANTED)
    assert "moments need 1.7 of the 1.7 GiB of GPU memory within reach" in found.fault
    assert combine_ranks(Fit(WANTED), [Fit(WANTED), found]).fault == found.fault


def test_ranks_use_what_fits_on_all():
    small, large = Fit(1_024, "small", tight=True), Fit(65_536, "large")
    assert combine_ranks(large, [large, small]) == small
    assert fit_from_estimate(WANTED, BOUNDS, 2_000).token_budget == 1_920


def test_memory_is_tight_from_three_fifths_on():
    # 10,092 MiB for a step with micro-batches of 8,192 tokens.
    for memory_mib, tight in ((10_092 / 0.6 + 1, False), (10_092 / 0.6 - 1, True)):
        found = choose_budget(BERT, BOUNDS, int(memory_mib * MIB), WANTED)
        assert (found.token_budget, found.tight) == (65_536, tight)


def test_the_allocator_is_left_as_its_user_set_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    runtimes.let_segments_grow()
    assert asked == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    runtimes.let_segments_grow()
    assert asked == ["expandable_segments:True"]


def test_plenty_is_far_beyond_all_that_may_be_needed():
    assert is_plenty(12_288, BOUNDS)
    assert not is_plenty(12_287, BOUNDS)


def measuring(demand: Demand, memory: float, asked: list[int]):
    """Return a simulated measurement on a GPU with `memory` for passes."""

    def measure(tokens: int):
        asked.append(tokens)
        taken = demand.passes(tokens)
        return (tokens, taken) if taken <= memory else None

    return measure


@pytest.mark.parametrize("start", [512, 2_000, 8_192])
@pytest.mark.parametrize("memory_mib", [900, 3_000, 20_000])
def test_few_passes_end_near_what_fits(start, memory_mib):
    asked: list[int] = []
    memory = memory_mib * MIB
    found = points(measuring(BERT, memory, asked), start, BOUNDS, memory)
    fixed, per_token = line(found)
    assert (fixed, per_token) == pytest.approx((BERT.fixed, BERT.per_token))
    fitting = min(BOUNDS.most, BERT.most_tokens(memory + 1_700 * MIB))
    assert 2.1 * found[-1][0] >= fitting
    assert len(asked) <= 5


@pytest.mark.parametrize("start", [1_250, 2_000, 6_000])
@pytest.mark.parametrize("rows_that_fit", [1.2, 2.5, 4.1, 100])
def test_passes_of_whole_rows_end_too(start, rows_that_fit):
    """A request for more tokens may result in the same pass as before."""
    asked: list[int] = []
    row, bounds = 1_000, Bounds(1_000, 8_192)
    free = BERT.passes(rows_that_fit * row)

    def measure(tokens: int):
        whole = tokens // row * row
        return measuring(BERT, free, asked)(whole)

    found = points(measure, start, bounds, free)
    assert len(asked) <= 6
    assert found[0][1] == BERT.passes(found[0][0])
    assert found[-1][0] >= min(rows_that_fit // 2, 7) * row


def test_nothing_is_found_where_the_longest_row_does_not_fit():
    asked: list[int] = []
    found = points(measuring(BERT, 100 * MIB, asked), 8_000, BOUNDS, 100 * MIB)
    assert (found, asked) == ([], [8_000, 2_000, 512])


def test_a_guess_is_none_where_a_config_says_no_sizes():
    settings = Settings(train={"global_batch_size": 256})
    assert guessed_tokens(settings, SimpleNamespace(model_type="own"), GIB) is None
    images = Settings(train={"rows": "images"})
    assert guessed_tokens(images, SimpleNamespace(), GIB) is None


def test_frozen_weights_have_no_gradient_and_no_moments():
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = BertForSequenceClassification(config)
    frozen = sum(p.numel() for p in model.bert.embeddings.parameters())
    whole = sum(p.numel() for p in model.parameters())
    found = [
        estimate(Settings(train={"freeze": parts}), config, 1_000).states
        for parts in ([], ["embeddings"])
    ]
    assert found == [16 * whole, 16 * (whole - frozen) + 4 * frozen]


@pytest.mark.parametrize(
    ("strategy", "rows"), [("packed", 4), ("grouped", 3), ("fixed", 2)]
)
def test_a_pass_has_the_longest_rows(strategy, rows):
    planner = Planner(strategy, 40, max_length=20)
    lengths = np.array([12, 9, 8])
    assert longest_rows(lengths, 41, planner) == rows
    assert longest_rows(lengths, 5, planner) == 1


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize("batching", ["packed", "grouped", "fixed"])
def test_passes_leave_no_trace(tmp_path, kind, batching):
    """Random numbers, gradients and weights are the same as without the passes."""
    config = {"model_type": kind, **CONFIGS[kind]}
    job = make_job(tmp_path, config=config, batching=batching, token_budget="auto")
    trainer = assemble(job, set_up(job.settings.runtime))
    model, stepper = trainer.model, trainer.stepper
    weights = [p.detach().clone() for p in model.parameters()]
    drawn = torch.get_rng_state()
    model.eval()
    with preserve_state(model, stepper):
        passes = Passes(job, trainer.resolved, model, stepper)
        batch = passes.batch(100)
        assert len(batch.micro_batches) == 1
        assert batch.num_padded_tokens <= 100
        planner = replace(passes._data.planner, overhead_tokens=0)
        passes._data = replace(passes._data, planner=planner)
        assert len(passes.batch(100).micro_batches) == 1
        passes.run(batch)
        assert any(p.grad is not None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    for before, after in zip(weights, model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_what_a_micro_batch_may_hold(tmp_path):
    job = make_job(tmp_path, token_budget="auto")
    trainer = assemble(job, set_up(job.settings.runtime))
    found = bounds_of(job, trainer.resolved, trainer.stepper)
    assert (found.least, found.most) == (24, 16 * 24)


def test_on_a_cpu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(assembling, "fit", None)
    job = make_job(tmp_path, token_budget="auto")
    trainer = assemble(job, set_up(job.settings.runtime))
    assert (trainer.resolved.token_budget, trainer.demand) == (8_192, None)


@pytest.mark.parametrize(("limit_gib", "share"), [(35.0, 0.25), (200.0, 1.0)])
def test_a_process_may_be_held_to_a_smaller_card(monkeypatch, caplog, limit_gib, share):
    """There is no GPU, so the driver's calls are simulated."""
    taken = []
    properties = SimpleNamespace(total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda f, _: taken.append(f)
    )
    runtimes._limit_memory(limit_gib, torch.device("cuda"))
    runtimes._limit_memory(limit_gib, torch.device("cpu"))
    runtimes._limit_memory(None, torch.device("cuda"))
    assert taken == [share]
    told = "NVIDIA H200 has 140.0 GiB, not 200: all of it is used"
    assert (told in caplog.text) is (limit_gib > 140)
