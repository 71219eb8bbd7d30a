"""Whether a training comes to what trials of its settings gave."""

import pytest

from flatout.project.tuned import kept


@pytest.mark.parametrize(
    ("came", "inside", "said"),
    [
        (95.0, True, ": inside"),
        (82.0, True, ": below"),
        (80.0, False, ": below. The machine has other work now"),
        (120.0, True, ": above"),
    ],
)
def test_a_training_says_whether_it_came(came, inside, said):
    tuned = {"samples_per_s_low": 90.0, "samples_per_s_high": 110.0}
    found, text = kept(came, tuned)
    assert found == inside
    assert (
        f"trials gave 90.0 to 110.0 samples/s, this training {came:,.1f}{said}" in text
    )
    assert kept(came, {"samples_per_s": 100.0, "samples_per_s_low": "x"}) is None


@pytest.mark.parametrize(("trained_s", "judged"), [(4.9, False), (5.1, True)])
def test_a_training_of_a_few_seconds_is_not_judged(trained_s, judged):
    tuned = {"samples_per_s_low": 90.0, "samples_per_s_high": 110.0}
    found, text = kept(80.0, tuned, trained_s)
    assert found == (not judged)
    assert ("80.0: below, but 4.9 s of training are too short" in text) != judged
    assert kept(100.0, tuned, trained_s)[1].endswith("inside")
