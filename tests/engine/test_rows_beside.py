"""An LSTM whose rows several threads share is PyTorch's LSTM, and so is a training."""

import copy
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.machine.threads import Threads
from flatout.engine.ops import lstm as ops
from flatout.engine.ops.lstm import RowsBeside
from flatout.engine.parameters import parse_settings
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


def cpu(threads):
    return Runtime(torch.device("cpu"), "CPU", "fp32", Ranks(), threads=threads)


@pytest.fixture(autouse=True)
def few_cells(monkeypatch):
    """Shares for rows as few as those of these tests."""
    monkeypatch.setattr(ops, "LEAST_CELLS", 1)


def both(threads=2, **sizes):
    """PyTorch's LSTM, and its like by threads."""
    torch.manual_seed(0)
    plain = nn.LSTM(6, 8, **sizes)
    own = copy.deepcopy(plain)
    RowsBeside.put_in(nn.ModuleList([own]), Threads(threads))
    return plain, own


def passes(lstm, inputs):
    """States, and the gradients of inputs and weights."""
    given = inputs.detach().requires_grad_()
    states = lstm(given)[0]
    kept = torch.linspace(-1, 1, states.numel()).view_as(states)
    (states * kept).sum().backward()
    return [states, given.grad, *(own.grad for own in lstm.parameters())]


SIZES = [
    {},
    {"batch_first": True},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "bias": False},
    {"proj_size": 3, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_rows_by_threads_are_pytorchs_lstm(sizes, threads, rows):
    plain, own = both(threads, **sizes)
    inputs = torch.randn((rows, 7, 6) if "batch_first" in sizes else (7, rows, 6))
    for found, expected in zip(passes(own, inputs), passes(plain, inputs), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(own(inputs)[0], plain(inputs)[0])
    with torch.inference_mode():
        found = own(inputs)[0]
        assert found.is_inference() and not found.requires_grad
        torch.testing.assert_close(found, plain(inputs)[0])


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs AVX-512"
)
def test_under_autocast_all_threads_compute_in_bf16():
    plain, own = both(num_layers=2, batch_first=True)
    inputs = torch.randn(5, 7, 6)
    exact = passes(plain, inputs)
    plain.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = passes(own, inputs), passes(plain, inputs)
    assert found[0].dtype == expected[0].dtype == torch.bfloat16
    for one, other, true in zip(found, expected, exact, strict=True):
        assert one.dtype == other.dtype
        assert (one - true).abs().max() <= true.abs().max() / 20


@pytest.mark.parametrize("fixed", ["inputs", "weight_hh_l1", "all"])
def test_what_is_frozen_has_no_gradient(fixed):
    grads = []
    for lstm in both(num_layers=2):
        for name, weight in lstm.named_parameters():
            weight.requires_grad_(fixed not in (name, "all"))
        given = torch.ones(7, 4, 6, requires_grad=fixed != "inputs")
        lstm(given)[0].square().sum().backward()
        grads.append([given.grad, *(own.grad for own in lstm.parameters())])
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_what_is_no_batch_from_zero_stays_pytorchs():
    """Given states, one row without a batch, packed rows; and last states."""
    plain, own = both(num_layers=2)
    state = torch.ones(2, 4, 8), torch.ones(2, 4, 8)
    inputs = torch.randn(7, 4, 6)
    packed = nn.utils.rnn.pack_padded_sequence(inputs, [7, 6, 3, 1])
    for given in ((inputs, state), (inputs[:, 0],), (packed,)):
        for one, other in zip(own(*given)[1], plain(*given)[1], strict=True):
            assert torch.equal(one, other)
    assert own(inputs)[1] is None


def test_dropout_between_layers_stays_pytorchs():
    lstm = nn.LSTM(6, 8, 2, dropout=0.5)
    RowsBeside.put_in(nn.ModuleList([lstm]), Threads(2))
    assert type(lstm) is nn.LSTM


def test_small_batches_are_not_shared_out(monkeypatch):
    _, own = both()
    monkeypatch.setattr(ops, "LEAST_CELLS", 7 * 4 * 8 // 2 + 1)
    assert own(torch.randn(7, 4, 6))[1] is not None
    assert own(torch.randn(7, 5, 6))[1] is None


def test_a_second_backward_pass_is_refused():
    _, own = both()
    states = own(torch.randn(7, 4, 6))[0]
    states.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes with its backward pass"):
        states.sum().backward()


@pytest.mark.parametrize("here", [True, False])
def test_an_error_surfaces_once_all_threads_have_ended(here):
    threads, ended = Threads(2), []

    def work(_):
        if (threading.current_thread() is threading.main_thread()) == here:
            raise ValueError("not in this thread")
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(ValueError, match="not in this thread"):
        threads.run(work, [1, 2])
    assert ended == [True]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("w") / "start", "next-key", window_keys=5)


def with_threads(job, threads):
    given = job.settings.model_dump(mode="json")
    given["runtime"]["threads"] = threads
    return replace(job, settings=parse_settings(given))


@pytest.mark.parametrize("threads", [2, 3])
def test_windows_by_threads_train_as_plain_pytorch(
    tmp_path, start, threads, monkeypatch
):
    """Loss, gradients, rate and norm of ten steps, and the weights behind them."""
    shares, run = [], Threads.run

    def counted(self, work, given):
        shares.append(len(given))
        return run(self, work, given)

    monkeypatch.setattr(Threads, "run", counted)
    job = job_for(tmp_path, "next-key", start)
    found, _ = observed(job, cpu(threads))
    assert_same(found, plain_training(job))
    assert set(shares) == {threads} and len(shares) >= 20


def test_a_whole_training_is_that_of_one_thread(tmp_path, start):
    """Its history, with evaluations, and what the report says of it."""
    results = [
        train(job_for(tmp_path / str(n), "next-key", start, evaluate_every=5), cpu(n))
        for n in (1, 2)
    ]
    histories = [
        [(p.loss, p.grad_norm, p.learning_rate) for p in own.history] for own in results
    ]
    torch.testing.assert_close(*map(torch.tensor, histories), rtol=1e-4, atol=1e-5)
    reports = [own.report for own in results]
    assert [own.lstm_threads for own in reports] == [0, 2]
    assert reports[1].validation_loss == pytest.approx(reports[0].validation_loss, 1e-4)


def test_a_killed_run_resumes_bit_for_bit_and_on_other_cores(tmp_path, start):
    def of(name, threads=2):
        options = {"checkpoint": {"every_steps": 2}, "resume": "auto"}
        return with_threads(
            job_for(tmp_path / name, "next-key", start, **options), threads
        )

    whole = run_job(of("whole"))
    for threads in (2, 1):
        name = f"crashed {threads}"
        with pytest.raises(Crash), when_logged("step 6/10  loss", crash):
            run_job(of(name))
        resumed = run_job(of(name, threads))
        assert resumed.report.resumed_from_step in range(2, 7)
        assert resumed.report.lstm_threads == (2 if threads == 2 else 0)
        if threads == 2:
            assert curve(resumed) == curve(whole)
        losses = [[p.loss for p in own.history] for own in (resumed, whole)]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)


def test_where_threads_share_rows(tmp_path, start):
    """Windows alone; not one thread, several ranks, or layers computed again."""
    job = job_for(tmp_path, "next-key", start)
    config, two = assemble(job, cpu(1)).model.model.config, cpu(2)

    def found(job=job, runtime=two, **own):
        changed = copy.deepcopy(config)
        for name, value in own.items():
            setattr(changed, name, value)
        return resolve(job, runtime, changed).lstm_threads

    assert (found(), found(runtime=cpu(4))) == (2, 4)
    assert found(runtime=cpu(1)) == 0
    assert found(runtime=replace(cpu(4), ranks=Ranks(0, 0, 2, 2))) == 0
    assert found(window_keys=None) == 0
    assert found(dropout=0.1) == 0
    assert found(dropout=0.1, num_hidden_layers=1) == 2
    again = job_for(tmp_path, "next-key", start, gradient_checkpointing=True)
    assert found(again) == 0
