"""The records of a run: which model is the best, and throughput without pauses."""

import logging
import math
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from flatout.engine.batches import collation
from flatout.engine.launch.launch import run_job
from flatout.engine.train import loop
from flatout.engine.train.recording.timing import compile_clock
from tests.engine.runs import make_job, metrics_of
from tests.make import plain_logits

# The loss jumps at this rate: the best model is neither the first nor the last.
JUMPS = {"epochs": 4, "learning_rate": 3e-2, "schedule": "constant"}


def plain_loss(folder, rows) -> float:
    """Return the loss of a saved model, computed by transformers alone, row by row."""
    labels = torch.tensor(rows.table["labels"].to_pylist())
    return cross_entropy(torch.stack(plain_logits(folder, rows)), labels).item()


def test_the_model_of_the_lowest_validation_loss_is_kept_and_tested(tmp_path):
    job = make_job(tmp_path, evaluate_every=4, **JUMPS)
    result = run_job(job)
    losses = metrics_of(job)["validation_loss"]
    best = min(losses.values())
    first, last = losses[min(losses)], losses[max(losses)]
    assert min(first, last) > best + 0.01
    assert result.report.validation_loss == best
    assert plain_loss(result.model_folder, job.validation) == pytest.approx(best)
    assert plain_loss(result.model_folder, job.test) == pytest.approx(
        result.report.test_loss
    )
    assert plain_loss(result.last_model_folder, job.validation) == pytest.approx(last)


def test_a_first_validation_that_is_no_number_is_not_the_best_for_good(
    tmp_path, monkeypatch
):
    job, calls = make_job(tmp_path, evaluate_every=4), []
    evaluate_split = loop.evaluate_split

    def first_is_nan(trainer, rows):
        calls.append(rows)
        found = evaluate_split(trainer, rows)
        return replace(found, loss=math.nan) if len(calls) == 1 else found

    monkeypatch.setattr(loop, "evaluate_split", first_is_nan)
    result = run_job(job)
    losses = metrics_of(job)["validation_loss"].values()
    later = [loss for loss in losses if not math.isnan(loss)]
    assert len(later) == 2
    assert result.report.validation_loss == min(later)
    assert plain_loss(result.model_folder, job.validation) == pytest.approx(min(later))


BATCH_S = 0.05
"""Seconds that a worker needs per batch. Two workers create at most 160 samples/s."""


def test_batches_that_are_made_in_pauses_lift_no_rate(tmp_path, monkeypatch):
    """After every second step, there is a pause in which the workers can refill the
    queue, so that all batches are ready when steps request them."""
    make, evaluate_split = collation.StepRows.__getitem__, loop.evaluate_split

    def slow_make(data, step):
        time.sleep(BATCH_S)
        return make(data, step)

    def slow_evaluation(*args):
        time.sleep(4 * BATCH_S)
        return evaluate_split(*args)

    monkeypatch.setattr(collation.StepRows, "__getitem__", slow_make)
    monkeypatch.setattr(loop, "evaluate_split", slow_evaluation)
    loader = {"num_workers": 2, "prefetch_factor": 2}
    sizes = {"rows": 64, "global_batch_size": 4, "epochs": 1}
    result = run_job(
        make_job(tmp_path, loader=loader, evaluate_every=2, log_every=2, **sizes)
    )
    rates = [p.samples_per_s for p in result.history if p.step > 3]
    assert 0 < min(rates)
    # `sleep` never ends early, so no worker is faster.
    assert max(rates) <= 4 * 2 / BATCH_S
    assert 0 < result.report.samples_per_s <= 4 * 2 / BATCH_S


def late(monkeypatch, now, module, name, seconds):
    real = getattr(module, name)

    def slow(*args, **named):
        now[0] += seconds
        return real(*args, **named)

    monkeypatch.setattr(module, name, slow)


def test_each_second_belongs_to_one_phase(tmp_path, monkeypatch):
    """On a simulated clock, the first step begins after 10 s with 7 s of compilation.
    Each of 12 steps takes 1 s, and each of 4 evaluations takes 100 s."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name, value in {"seconds": 7.0, "count": 3, "_in_first_step": 0}.items():
        monkeypatch.setattr(compile_clock, name, value)
    late(monkeypatch, now, loop, "assemble", 10)
    late(monkeypatch, now, collation.StepRows, "__getitem__", 1)
    late(monkeypatch, now, loop, "evaluate_split", 100)
    result = run_job(make_job(tmp_path, evaluate_every=4, log_every=1))
    found = result.report.phases_s
    assert found == {
        **{"model": 3, "compilation": 7, "first_step": 1, "steps": 11},
        **{"evaluation": 400, "checkpoints": 0},
    }
    assert result.report.recompiles == 0
    rates = [point.samples_per_s for point in result.history[3:]]
    assert rates == [12, 16, 16, 16, 12, 16, 16, 16, 12]


def test_a_short_training_with_a_loader_ahead_has_a_rate_at_each_point(tmp_path):
    """16 batches are prefetched, but there are only 4 steps between two evaluations."""
    loader = {"num_workers": 4, "prefetch_factor": 4}
    job = make_job(tmp_path, loader=loader, evaluate_every="epoch", log_every=2)
    result = run_job(job)
    rated = [p.step for p in result.history if p.samples_per_s > 0]
    assert rated == [4, 6, 8, 10, 12]
    assert result.report.samples_per_s > 0


def test_the_progress_line_the_report_and_the_points_give_one_rate(tmp_path, caplog):
    job = make_job(tmp_path, log_every=2)
    with caplog.at_level(logging.INFO, "flatout.engine.train.recording.progress"):
        result = run_job(job)
    told = [text for text in caplog.messages if text.startswith("step 12/12")]
    line = next(text for text in told if "samples/s" in text)
    last = result.history[-1].samples_per_s
    mean = result.report.samples_per_s
    assert f"{last:.0f} samples/s (mean {mean:.0f})" in line
    sent = list(metrics_of(job)["train_samples_per_second"].values())
    assert sent == [p.samples_per_s for p in result.history if p.step > 3]
    # Steps have 16, 16, 16 and 12 rows. Windows: steps 4, 5-6, 7-8, 9-10, 11-12.
    windows = zip([12, 32, 28, 32, 28], sent, strict=True)
    seconds = sum(samples / rate for samples, rate in windows)
    assert mean == pytest.approx(132 / seconds)
