"""Trainings of bidirectional language models against a plain PyTorch loop."""

import numpy as np
import pytest

from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import RuntimeSettings
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    on_two_ranks,
    plain_training,
    save_start,
)

TASK = "bidirectional-lm"
CPU = set_up(RuntimeSettings(precision="fp32", threads=1))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "model", TASK)


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory):
    return plain_training(job_for(tmp_path_factory.mktemp("plain"), TASK, start))


@pytest.mark.parametrize(
    ("strategy", "budget"), [("fixed", 60), ("random", 4096), ("grouped", 60)]
)
def test_every_strategy_trains_as_plain_pytorch(
    tmp_path, start, expected, strategy, budget
):
    """Loss, gradients, rate and norm of ten steps, and the weights behind them."""
    job = job_for(tmp_path, TASK, start, batching=strategy, token_budget=budget)
    found, result = observed(job, CPU)
    assert result.report.strategy == strategy
    assert_same(found, expected)
    assert result.report.metrics["test_perplexity"] == pytest.approx(
        np.exp(expected.test_loss), rel=1e-4
    )


@pytest.mark.process
def test_two_ranks_train_as_one(tmp_path, start, expected):
    job = job_for(tmp_path / "job", TASK, start, token_budget=60)
    curve_of_two, result = on_two_ranks({"two": job}, tmp_path)["two"]
    assert (result.report.world_size, result.report.strategy) == (2, "grouped")
    assert_same(curve_of_two, expected)
