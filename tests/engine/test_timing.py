"""Windows with a clock of our own; rates that do not depend on how work is cut."""

import time
from types import SimpleNamespace

import pytest
import torch

from flatout.engine import timing
from flatout.engine.flops import ModelFlops, peak_tflops
from flatout.engine.timing import Rates, Window, WindowClock, steady
from tests.engine.families import step_rows, task_model


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def run_step(windows, now, batch, wait_s, compute_s):
    now.s += wait_s
    windows.step_begins()
    now.s += compute_s
    windows.step_ends(batch, wait_s)


def test_a_window_counts_real_samples_over_wall_time(clock):
    batch = step_rows("bert", "sequence-classification", "grouped")[0]
    windows = WindowClock(torch.device("cpu"))
    for _ in range(4):
        run_step(windows, clock, batch, wait_s=0.25, compute_s=0.75)
    window = windows.close()
    assert (window.steps, window.samples, window.wall_s) == (4, 48, 4.0)
    assert window.wait_s == pytest.approx(1.0)
    assert window.step_ms == pytest.approx([1000.0] * 4)
    rates = Rates.over([window])
    assert rates.samples_per_s == 12.0
    assert rates.loader_wait_pct == pytest.approx(25.0)
    assert rates.padding_pct == pytest.approx(
        100 * (1 - batch.num_tokens / batch.num_padded_tokens)
    )


def test_pauses_are_no_step_time(clock):
    batch = step_rows("bert", "sequence-classification", "packed")[0]
    windows = WindowClock(torch.device("cpu"))
    run_step(windows, clock, batch, 0.0, 1.0)
    windows.pause()
    clock.s += 100
    windows.resume()
    run_step(windows, clock, batch, 0.0, 1.0)
    window = windows.close()
    assert window.wall_s == 2.0
    assert window.step_ms == pytest.approx([1000.0, 1000.0])


def test_the_next_window_starts_from_zero(clock):
    batch = step_rows("bert", "sequence-classification", "packed")[0]
    windows = WindowClock(torch.device("cpu"))
    run_step(windows, clock, batch, 0.0, 1.0)
    windows.close()
    clock.s += 0.5
    run_step(windows, clock, batch, 0.0, 1.0)
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
    whole = step_rows("bert", "sequence-classification", "packed")[0]
    assert rates.samples_per_s == 6.0
    assert rates.tokens_per_s == whole.num_tokens / 2


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
    clock.add(1.0)
    assert clock.count == 2
    assert 1.01 <= clock.seconds < 1.5


def test_flops_count_what_is_computed():
    model = task_model("bert", "sequence-classification", "sdpa").model
    whole, narrowed = ModelFlops.of(model), ModelFlops.of(model, narrowed=True)
    # q, k, v, output 16 x 16 each, up 16 x 32, down 32 x 16, biases, two norms.
    layer = 4 * (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16) + 4 * 16
    behind = layer - 3 * (16 * 16 + 16)
    assert whole.body_parameters - narrowed.body_parameters == behind
    assert narrowed.head_parameters - whole.head_parameters == behind
    one = Window(1, 1, 7, 7, 49, 1, 1.0, 0.0, [1.0], True)
    assert whole.of_window(one) == (
        6 * whole.body_parameters * 7 + 6 * whole.head_parameters * 1 + 12 * 2 * 16 * 49
    )


def test_peaks_of_known_cards():
    assert peak_tflops("NVIDIA H200") == 989.5
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("AMD EPYC") is None
