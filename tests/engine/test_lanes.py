"""Micro-batches side by side on a CPU: the same training, and each time the same."""

import itertools
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from flatout.engine.batches.global_batches import Planner
from flatout.engine.families.bilm import Bilm
from flatout.engine.families.log_key_lstm import LogKeyLstm
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.machine.signals import Interrupted
from flatout.engine.models.model import TaskModel
from flatout.engine.ops.dropout import DrawnDropout
from flatout.engine.parameters import parse_settings
from flatout.engine.train.lanes import Lanes, Passes
from flatout.engine.train.loop import train
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.resolved_config import resolve
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    plain_training,
    save_start,
)
from tests.engine.runs import Crash, crash, curve, when_logged

STARTS = {
    "next-key": ("next-key", {}),
    "windows": ("next-key", {"window_keys": 5}),
    "bidirectional-lm": ("bidirectional-lm", {}),
}


def cpu(threads):
    return Runtime(torch.device("cpu"), "CPU", "fp32", Ranks(), threads=threads)


@pytest.fixture(scope="module", autouse=True)
def few_tokens():
    """Lanes for rows as few as those of these tests."""
    before = [(own, own.lane_tokens) for own in (Bilm, LogKeyLstm)]
    for own, _ in before:
        own.lane_tokens = lambda self, config: 8
    yield
    for own, found in before:
        own.lane_tokens = found


@pytest.fixture(scope="module", params=STARTS)
def plain(request, tmp_path_factory):
    """A task, weights to start from, and ten steps of plain PyTorch from there."""
    task, own = STARTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    start = save_start(folder / "start", task, **own)
    return task, start, plain_training(job_for(folder, task, start))


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(
    ("strategy", "budget"), [("fixed", 60), ("random", 4096), ("grouped", 60)]
)
def test_micro_batches_side_by_side_train_as_plain_pytorch(
    tmp_path, plain, strategy, budget, threads
):
    """Loss, gradients, rate and norm of ten steps, and the weights behind them. The
    last batch of an epoch has 12 rows."""
    task, start, expected = plain
    job = job_for(tmp_path, task, start, batching=strategy, token_budget=budget)
    assert assemble(job, cpu(threads)).resolved.lanes == threads
    found, _ = observed(job, cpu(threads))
    assert_same(found, expected)


def test_one_row_a_step_is_no_lane_of_its_own(tmp_path, plain):
    """Both biases of an LSTM have one gradient, which an update must not clip twice."""
    task, start, _ = plain
    curves = []
    for threads in (1, 2):
        job = job_for(tmp_path / str(threads), task, start, rows=9, global_batch_size=8)
        result = train(job, cpu(threads))
        curves.append([(p.loss, p.grad_norm) for p in result.history])
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=1e-4, atol=1e-5)


def with_settings(job, **own):
    given = job.settings.model_dump(mode="json")
    for name, value in own.items():
        part, key = name.split("__")
        given[part][key] = value
    return replace(job, settings=parse_settings(given))


def of_drawing(folder, start, threads, precision):
    """A training whose passes draw what they drop."""
    options = {"checkpoint": {"every_steps": 2}, "resume": "auto", "token_budget": 60}
    job = job_for(folder, "bidirectional-lm", start, **options)
    return with_settings(job, runtime__threads=threads, runtime__precision=precision)


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawing")
    return save_start(folder / "start", "bidirectional-lm", dropout=0.3)


@pytest.mark.parametrize(("threads", "precision"), [(2, "fp32"), (3, "bf16")])
def test_a_training_that_draws_is_the_same_each_time(
    tmp_path, drawing, threads, precision
):
    """Whichever lane is first, and where it goes on from a checkpoint."""
    whole = run_job(of_drawing(tmp_path / "whole", drawing, threads, precision))
    again = run_job(of_drawing(tmp_path / "again", drawing, threads, precision))
    assert whole.report.lanes == threads
    job = of_drawing(tmp_path / "crashed", drawing, threads, precision)
    with pytest.raises(Crash), when_logged("step 6/10  loss", crash):
        run_job(job)
    resumed = run_job(job)
    assert resumed.report.resumed_from_step in range(2, 7)
    assert curve(whole) == curve(again) == curve(resumed)


def test_lanes_draw_what_no_other_lane_draws():
    dropout, seen = DrawnDropout(0.5).train(), []
    lanes, ones = Lanes(3), torch.ones(1000)

    def work(delay):
        time.sleep(delay)
        return dropout(ones)

    for delays in ([0.0, 0.02, 0.04], [0.04, 0.02, 0.0]):
        torch.manual_seed(3)
        seen.append(torch.stack(lanes.run(work, delays)))
    assert torch.equal(*seen)
    assert len(seen[0].unique(dim=0)) == 3
    assert not torch.equal(torch.stack(lanes.run(work, [0.0] * 3)), seen[0])


def test_an_error_in_a_lane_is_the_steps_and_others_end_first(tmp_path, plain):
    task, start, _ = plain
    trainer = assemble(job_for(tmp_path, task, start), cpu(2))
    ended = []

    class Fails(nn.Module):
        def forward(self, batch):
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("not in this lane")
            time.sleep(0.05)
            ended.append(True)
            return trainer.model(batch)

    class FailsHere(nn.Module):
        def forward(self, batch):
            if threading.current_thread() is threading.main_thread():
                raise RuntimeError("not in this lane")
            time.sleep(0.05)
            ended.append(True)
            return trainer.model(batch)

    for module in (Fails(), FailsHere()):
        trainer.stepper.module = module
        with pytest.raises(RuntimeError, match="not in this lane"):
            trainer.stepper(trainer.data[0])
    assert len(ended) >= 2
    trainer.stepper.module = trainer.model
    trainer.stepper(trainer.data[0])
    assert torch.isfinite(trainer.stepper.sums.loss)


def test_ctrl_c_ends_the_step_and_saves(tmp_path, plain):
    task, start, _ = plain
    options = {"checkpoint": {"every_steps": 100}, "resume": "auto"}
    whole = train(job_for(tmp_path / "whole", task, start, **options), cpu(2))
    job = job_for(tmp_path / "stopped", task, start, **options)
    stop = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
    with pytest.raises(Interrupted), when_logged("step 4/10  loss", stop):
        train(job, cpu(2))
    assert curve(train(job, cpu(2))) == curve(whole)


def test_memory_that_runs_out_in_a_lane_halves_the_budget(tmp_path, plain):
    task, start, _ = plain
    job = job_for(tmp_path, task, start, token_budget=4096, on_oom="shrink")
    given = itertools.count()
    plain_forward = TaskModel.forward

    def forward(self, batch):
        if next(given) == 1:
            raise MemoryError("no memory for a micro-batch")
        return plain_forward(self, batch)

    TaskModel.forward = forward
    try:
        result = train(job, cpu(2))
    finally:
        TaskModel.forward = plain_forward
    assert len(result.history) == 10


@pytest.mark.parametrize("strategy", ["fixed", "random", "grouped", "packed"])
@pytest.mark.parametrize("lanes", [2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 6, 40])
def test_a_plan_deals_every_row_to_one_lane(strategy, lanes, count):
    lengths = np.random.default_rng(count).integers(1, 30, count)
    planner = Planner(strategy, 120, 30, overhead_tokens=8, lanes=lanes)
    plan = planner.plan(lengths)
    rows = [row for own in plan.micro_batches[0] for row in own.tolist()]
    assert sorted(rows) == list(range(count))
    assert sum(plan.lanes) == len(plan.micro_batches[0])
    assert len(plan.lanes) == min(lanes, count) or count < 2 * lanes
    ends = np.cumsum(plan.lanes)
    shares = [
        sum(int(lengths[own].sum()) for own in plan.micro_batches[0][end - size : end])
        for end, size in zip(ends, plan.lanes, strict=True)
    ]
    if strategy != "fixed":
        assert max(shares) - min(shares) <= 2 * lengths.max()
    for own in plan.micro_batches[0]:
        longest = 30 if strategy == "fixed" else int(lengths[own].max())
        tokens = len(own) * longest if strategy != "packed" else lengths[own].sum()
        assert tokens <= max(longest, int(lengths.max()), 120 // lanes)


def test_where_there_are_no_lanes(tmp_path, plain):
    """One thread, several ranks, layers computed again; and no more than pay."""
    task, start, _ = plain
    job = job_for(tmp_path, task, start)

    config = assemble(job, cpu(1)).model.model.config

    def lanes(job, runtime):
        return resolve(job, runtime, config).lanes

    assert lanes(job, cpu(4)) == 4
    assert lanes(job, cpu(1)) == 0
    assert lanes(job, replace(cpu(4), ranks=Ranks(0, 0, 2, 2))) == 0
    again = with_settings(job, train__gradient_checkpointing=True)
    assert lanes(again, cpu(4)) == 0
    few = with_settings(job, train__global_batch_size=1)
    assert lanes(few, cpu(64)) == 1


def test_sums_of_gradients_are_tensors_of_their_own():
    one = torch.ones(2)
    whole = Passes(one, [one, one, None, one], []) + Passes(
        one, [one, None, None, one], []
    )
    assert [None if g is None else g.tolist() for g in whole.gradients] == [
        [2, 2],
        [1, 1],
        None,
        [2, 2],
    ]
    places = [g.data_ptr() for g in whole.gradients if g is not None]
    assert len(set(places)) == 3 and one.data_ptr() not in places
