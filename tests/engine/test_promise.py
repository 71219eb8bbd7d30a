"""The promised rate: what nine of ten trainings come to."""

import numpy as np
import pytest
from scipy.stats import t

from flatout.engine.benchmark.promise import kept, promised

WANDERS = 0.06
"""Standard deviation of a window's rate."""


def test_nine_of_ten_windows_come_to_what_was_promised():
    drawn = np.random.default_rng(0).normal(100.0, 100 * WANDERS, (4000, 9))
    found = [promised(list(row[:3]), list(row[3:8] / 1.5), 1.5) for row in drawn]
    inside = [p.low <= row[8] <= p.high for p, row in zip(found, drawn, strict=True)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.015)


def test_windows_of_both_settings_are_one_sample():
    promise = promised([110.0, 90.0], [45.0, 55.0], 2.0)
    assert promise.samples_per_s == 100.0
    spread = np.std([110, 90, 90, 110], ddof=1) * np.sqrt(1 + 1 / 4)
    assert promise.high - 100 == pytest.approx(t.ppf(0.95, 3) * spread)


def test_a_quiet_machine_promises_two_percent_and_two_windows_nothing():
    quiet = promised([100.0, 100.0, 100.0])
    assert (quiet.low, quiet.high) == (98.0, 102.0)
    few = promised([100.0, 110.0])
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
