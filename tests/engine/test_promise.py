"""The promised rate: what nine of ten trainings come to."""

import numpy as np
import pytest
from scipy.stats import t

from flatout.engine.benchmark.promise import kept, promised

NOISE = 0.03


def drawn(world: str, trials: int, draw: np.random.Generator):
    """Four windows of each trial, and what a training comes to after them."""
    steps = NOISE * draw.normal(size=trials + 1)
    wander = 0.3 * NOISE * draw.normal(size=(trials, 4))
    levels = {
        "windows differ": 0 * steps,
        "processes differ": steps,
        "the machine drifts": np.cumsum(steps),
    }[world]
    if world == "windows differ":
        wander *= 3
    return 100 * (1 + levels[:-1, None] + wander), 100 * (1 + levels[-1])


@pytest.mark.parametrize("trials", [2, 4])
@pytest.mark.parametrize(
    "world", ["windows differ", "processes differ", "the machine drifts"]
)
def test_nine_of_ten_trainings_come_to_what_was_promised(world, trials):
    draw = np.random.default_rng(0)
    inside, halves = [], []
    for _ in range(1500):
        windows, came = drawn(world, trials, draw)
        promise = promised(windows.tolist())
        inside.append(promise.low <= came <= promise.high)
        halves.append((promise.high - promise.samples_per_s) / promise.samples_per_s)
    assert np.mean(inside) >= 0.89
    assert np.median(halves) <= 0.15


def test_trials_are_what_is_counted_and_the_usual_deviation_as_four():
    promise = promised([[110.0, 90.0], [100.0, 120.0]])
    assert promise.samples_per_s == 105.0
    within = (10**2 + 10**2 + 10**2 + 10**2) / 2
    variance = (4 * within + 5**2 + 5**2) / 5
    half = t.ppf(0.95, 5) * np.sqrt(variance * (1 + 1 / 2) + 10**2)
    assert promise.high - 105 == pytest.approx(half)


def test_a_quiet_machine_promises_some_percent_and_two_windows_nothing():
    quiet = promised([[100.0, 100.0], [100.0]], usual=0.01)
    assert quiet.high - 100 == pytest.approx(t.ppf(0.95, 5) * np.sqrt(4 / 5 * 1.5))
    few = promised([[100.0, 110.0]])
    assert (few.samples_per_s, few.low, few.high) == (105.0, None, None)


@pytest.mark.parametrize(
    ("came", "inside", "said"),
    [(95.0, True, ": inside"), (80.0, False, ": below. "), (120.0, False, ": above. ")],
)
def test_a_training_says_whether_it_came(came, inside, said):
    tuned = {"samples_per_s_low": 90.0, "samples_per_s_high": 110.0}
    found, text = kept(came, tuned)
    assert found == inside
    assert f"90.0 to 110.0 samples/s were promised, {came:,.1f} came{said}" in text
    assert kept(came, {"samples_per_s": 100.0, "samples_per_s_low": "x"}) is None


@pytest.mark.parametrize(
    ("came", "tflops", "inside", "said"),
    [
        (72.0, 0.4, True, "at 0.80 of its speed in the tune, which makes 72.0 to 88.0"),
        (71.9, 0.4, False, ": below. The machine is not as it was"),
        (132.0, 0.6, True, "at 1.20 of its speed in the tune, which makes 108.0 to"),
        (100.0, 0.4, True, ": inside"),
        (80.0, None, False, ": below. "),
    ],
)
def test_a_machine_that_has_become_another_is_told_from_settings_that_have(
    came, tflops, inside, said
):
    tuned = {"samples_per_s_low": 90.0, "samples_per_s_high": 110.0}
    found, text = kept(came, {**tuned, "tflops_per_s": 0.5}, tflops)
    assert (found, said in text) == (inside, True), text
    assert kept(came, tuned, tflops)[0] == (90 <= came <= 110), "an older conf/tuned"
