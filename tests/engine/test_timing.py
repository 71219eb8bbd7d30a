"""Windows on a simulated clock, and throughput however work is divided."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flatout.engine.batches.loader import WorkerTimes
from flatout.engine.train.recording import timing
from flatout.engine.train.recording.timing import Rates, Window, WindowClock, steady
from tests.engine.families import step_rows


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


BATCH = step_rows("bert", "sequence-classification", "packed")[0]
"""A batch of 12 rows without padding."""


def run_step(windows, now, batch, wait_s, compute_s):
    now.s += wait_s
    windows.step_begins()
    now.s += compute_s
    windows.step_ends(batch, wait_s)


def test_a_window_counts_real_samples_over_wall_time(clock):
    batch = step_rows("bert", "sequence-classification", "grouped")[0]
    batch = replace(batch, attention_pairs=7)
    windows = WindowClock(torch.device("cpu"))
    for _ in range(4):
        run_step(windows, clock, batch, wait_s=0.25, compute_s=0.75)
    window = windows.close()
    assert (window.steps, window.samples, window.wall_s) == (4, 48, 4.0)
    assert window.clean
    assert (window.attention_pairs, window.targets) == (28, 48)
    assert window.tokens == 4 * batch.num_tokens
    assert window.padded_tokens == 4 * batch.num_padded_tokens
    assert window.wait_s == pytest.approx(1.0)
    assert window.step_ms == pytest.approx([1000.0] * 4)
    rates = Rates.over([window])
    assert rates.samples_per_s == 12.0
    assert rates.padded_tokens_per_s == batch.num_padded_tokens
    assert rates.loader_wait_pct == pytest.approx(25.0)
    assert rates.padding_pct == pytest.approx(
        100 * (1 - batch.num_tokens / batch.num_padded_tokens)
    )


def test_pauses_are_no_step_time(clock):
    windows = WindowClock(torch.device("cpu"))
    run_step(windows, clock, BATCH, 0.0, 1.0)
    windows.pause()
    clock.s += 100
    windows.resume()
    run_step(windows, clock, BATCH, 0.0, 2.0)
    window = windows.close()
    assert window.wall_s == 3.0
    assert window.step_ms == pytest.approx([1000.0, 2000.0])


class Workers:
    """Two simulated workers. Each creates every second batch in `batch_s`, and at most
    `DEPTH` batches are finished or in progress."""

    DEPTH = 4

    def __init__(self, now, batch_s):
        self.now, self.batch_s, self.times = now, batch_s, WorkerTimes(2)
        self.made_at_s, self.told, self.taken = [], 0, 0
        for _ in range(self.DEPTH):
            self._begin(0.0)

    def _begin(self, asked_s):
        free_s = self.made_at_s[-2] if len(self.made_at_s) > 1 else 0.0
        self.made_at_s.append(max(free_s, asked_s) + self.batch_s)

    def take(self) -> float:
        """Take a batch, and return how long the step waits for it."""
        wait_s = max(0.0, self.made_at_s[self.taken] - self.now.s)
        self.taken += 1
        self._begin(self.now.s + wait_s)
        return wait_s

    def tell(self) -> float:
        made = sum(made_s <= self.now.s for made_s in self.made_at_s)
        for batch in range(self.told, made):
            self.times.add(batch % 2, 1, self.batch_s)
        self.told = made
        return self.times.batch_s()


def simulated(now, batch_s, evaluate_every, log_every, steps=120) -> list[Window]:
    """Return the windows of steps of 1 s with evaluations of 50 s."""
    windows, workers = WindowClock(torch.device("cpu")), Workers(now, batch_s)
    found = []
    for done in range(1, steps + 1):
        run_step(windows, now, BATCH, workers.take(), 1.0)
        if done == timing.WARMUP_STEPS:
            windows.begin()
        if done % log_every == 0 and done > timing.WARMUP_STEPS:
            found.append(windows.close(batch_s=workers.tell()))
        if evaluate_every and done % evaluate_every == 0:
            windows.pause()
            now.s += 50
            windows.resume()
    return found


@pytest.mark.parametrize("log_every", [1, 10, 50])
@pytest.mark.parametrize("evaluate_every", [None, 2, 8, 40])
@pytest.mark.parametrize("times_too_slow", [0, 0.9, 1.1, 1.3, 4])
def test_no_pause_changes_a_rate(clock, times_too_slow, evaluate_every, log_every):
    """A loader that keeps up has no effect. Otherwise, its rate is measured."""
    windows = simulated(clock, 2.0 * times_too_slow, evaluate_every, log_every)
    rate = 12 / max(1.0, times_too_slow)
    assert Rates.over(windows).samples_per_s == pytest.approx(rate, rel=0.03)
    points = [Rates.over([window]).samples_per_s for window in windows]
    assert max(points) < 1.03 * rate
    if times_too_slow < 1:
        assert points == pytest.approx([12.0] * len(points))


def test_batches_from_a_pause_count_as_waited_for(clock):
    """Steps take 1 s on prefetched batches, for which the loader needs 4 s each."""
    windows = WindowClock(torch.device("cpu"))
    for _ in range(4):
        run_step(windows, clock, BATCH, 0.0, 1.0)
    rates = Rates.over([windows.close(batch_s=4.0)])
    assert (rates.samples_per_s, rates.loader_wait_pct) == (3.0, 75.0)


def test_what_a_batch_costs_the_workers_is_of_late():
    times = WorkerTimes(2)
    assert times.batch_s() == 0.0
    for worker in (0, 1, 0, 1):
        times.add(worker, 1, 6.0)
    assert times.batch_s() == 3.0
    times.add(0, 1, 1.0)
    assert times.batch_s() == 3.0  # one batch is not enough
    for worker in (1, 0, 1):
        times.add(worker, 10, 10.0)
    assert times.batch_s() == 0.5
    assert WorkerTimes(0).batch_s() == 0.0


def test_the_next_window_starts_from_zero(clock):
    windows = WindowClock(torch.device("cpu"))
    run_step(windows, clock, BATCH, 0.0, 1.0)
    windows.close()
    clock.s += 0.5
    run_step(windows, clock, BATCH, 0.0, 1.0)
    assert windows.close().samples == 12


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("budget", [24, 60, 4096])
def test_rates_do_not_depend_on_budget_and_world_size(clock, world_size, budget):
    batch = step_rows(
        "bert",
        "sequence-classification",
        "packed",
        world_size=world_size,
        token_budget=budget,
    )[0]
    windows = WindowClock(torch.device("cpu"))
    run_step(windows, clock, batch, 0.0, 2.0)
    rates = Rates.over([windows.close()])
    assert rates.samples_per_s == 6.0
    assert rates.tokens_per_s == BATCH.num_tokens / 2


def window(samples, wall_s, clean=True):
    return Window(1, samples, 10, 10, 100, samples, wall_s, 0.0, [wall_s * 1000], clean)


def test_windows_with_a_compilation_do_not_count():
    slow, fast = window(10, 100.0, clean=False), window(10, 1.0)
    assert steady([slow, fast]) == [fast]
    assert Rates.over([slow, fast]).samples_per_s == 10.0
    assert steady([slow]) == [slow]


def test_compilations_are_timed_apart():
    clock = timing.CompileClock()
    clock._started()
    time.sleep(0.01)
    clock._ended()
    clock._ended()  # events that began before there was a listener
    clock.add(1.0)
    assert clock.count == 2
    assert 1.01 <= clock.seconds < 1.5
