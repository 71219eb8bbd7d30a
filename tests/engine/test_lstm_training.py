"""Training LSTMs of one and both directions, compared with a plain PyTorch loop."""

import pytest

from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    on_two_ranks,
    plain_training,
    save_start,
)
from tests.engine.runs import CPU

CASES = {
    "whole sessions": ("next-key", {}),
    "windows": ("next-key", {"window_keys": 5}),
    "both directions": ("bidirectional-lm", {}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def plain(request, tmp_path_factory):
    """A task, initial weights, and ten steps of plain PyTorch."""
    task, sizes = request.param
    folder = tmp_path_factory.mktemp("plain")
    start = save_start(folder / "start", task, **sizes)
    return task, start, plain_training(job_for(folder, task, start))


@pytest.mark.parametrize(
    ("strategy", "budget"), [("fixed", 60), ("random", 24), ("grouped", 24)]
)
def test_every_strategy_and_budget_trains_as_plain_pytorch(
    tmp_path, plain, strategy, budget
):
    """The values of ten steps are equal, and so are the final weights."""
    task, start, expected = plain
    job = job_for(tmp_path, task, start, batching=strategy, token_budget=budget)
    found, result = observed(job, CPU)
    assert result.report.strategy == strategy
    assert_same(found, expected)


@pytest.mark.process
def test_two_ranks_train_as_one(tmp_path, plain):
    task, start, expected = plain
    job = job_for(tmp_path / "job", task, start, token_budget=60)
    curve_of_two, result = on_two_ranks({"two": job}, tmp_path)["two"]
    assert (result.report.world_size, result.report.strategy) == (2, "grouped")
    assert_same(curve_of_two, expected)
