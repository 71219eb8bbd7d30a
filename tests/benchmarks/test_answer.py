"""The benchmark's result in one sentence, for each mode."""

import pandas as pd
import pytest

from flatout.reports.answer import answer
from flatout.reports.report import report_text
from tests.pipelines.test_benchmark import LADDER, SUMMARY

NOTHING_GAINED = {**SUMMARY["tuned"], "gained": False}
OTHER_BATCH = {
    **SUMMARY["tuned"],
    "changes_optimisation": True,
    "parameters": {"train": {"global_batch_size": 8}},
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "Bound by: compute. Tuned settings are in conf/tuned: 50 samples/s "
            "(trials: 48 to 52) instead of 40 (1.25x). Train with them: kedro run "
            "--env=tuned, with the same --params.",
        ),
        (
            {"tuned": OTHER_BATCH, "global_batch_size": 16},
            "Bound by: compute. Tuned settings are in conf/tuned: 50 samples/s "
            "(trials: 48 to 52) instead of 40 (1.25x), with global batch 8 instead of "
            "16, which changes the optimisation. Train with them: kedro run "
            "--env=tuned, with the same --params.",
        ),
        (
            {"tuned": NOTHING_GAINED},
            "Bound by: compute. No measured settings are faster than the configured "
            "ones, 40 samples/s (trials: 48 to 52).",
        ),
        (
            {"tuned": None, "failed": {"trial_id": "001", "status": "oom"}},
            "No recommendation: trial 001 oom.",
        ),
        (
            {
                "tuned": None,
                "failed": {"trial_id": "001", "status": "error", "note": "no head."},
            },
            "No recommendation: trial 001 error: no head.",
        ),
        (
            {"mode": "ladder"},
            "All kept optimisations together give 2.5 times "
            "conf/slow, 25 samples/s; the largest step is TF32 (2.50x).",
        ),
        (
            {"tuned": None},
            "Bound by: compute. No recommendation: no settings leave "
            "benchmark.memory_headroom free.",
        ),
    ],
)
def test_each_mode_has_a_sentence(changes, sentence):
    summary = {**SUMMARY, **changes}
    assert answer(summary, LADDER) == sentence


def test_the_report_begins_with_the_answer():
    text = report_text(SUMMARY, pd.DataFrame(), LADDER)
    assert text.startswith("# Benchmark: tune\n\n**Tuned.**\n\n2026-01-02")
