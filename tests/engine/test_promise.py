"""Whether a training run reaches the throughput of trials with its settings."""

import logging

import pytest

from flatout.project.tuned import log_rate_check


@pytest.mark.parametrize(
    ("came", "trained_s", "level", "said"),
    [
        (95.0, 9.0, "INFO", ": inside"),
        (82.0, 9.0, "INFO", ": below"),
        (80.0, 9.0, "WARNING", ": below. The machine is busy, or has changed"),
        (80.0, 4.9, "INFO", ": below, but 4.9 s of training are too short"),
        (120.0, 9.0, "INFO", ": above"),
    ],
)
def test_a_training_says_whether_it_came(caplog, came, trained_s, level, said):
    tuned = {"samples_per_s_low": 90.0, "samples_per_s_high": 110.0}
    report = {"samples_per_s": came, "train_wall_s": trained_s}
    with caplog.at_level(logging.INFO):
        log_rate_check({"samples_per_s": 100.0, "samples_per_s_low": "x"}, report)
        log_rate_check(tuned, report)
    [record] = caplog.records
    assert record.levelname == level
    text = f"trials gave 90.0 to 110.0 samples/s, this training {came:,.1f}{said}"
    assert text in record.getMessage()
