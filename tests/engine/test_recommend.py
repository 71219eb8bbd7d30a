"""Recommended settings, and the expected training time."""

import pytest
import yaml

from flatout.engine.benchmark.recommend import (
    mismatches,
    pick,
    provenance,
    scaled_learning_rate,
    time_to_train,
    tuned_parameters,
)
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.parameters import parse_settings
from flatout.reports.tuned import parameters_text
from tests.engine import benches
from tests.engine.benches import settings


def trial(number: str, rate: float, gib: float, **figures) -> TrialResult:
    measured = {"samples_per_s": rate, "reserved_memory_gib": gib}
    return benches.trial(number, **measured, **figures)


def test_three_picks():
    trials = [
        trial("001", 100.0, 10.0),
        trial("002", 180.0, 75.0),
        trial("003", 150.0, 40.0),
        trial("004", 900.0, 40.0, global_batch_size=64),
        trial("005", 999.0, 40.0, kind="compute"),
        trial("006", 999.0, 40.0, status="oom"),
    ]
    found = pick(trials, 8, memory_gib=80.0, headroom=0.1)
    assert [one.trial_id for one in found.values()] == ["002", "001", "003"]
    free = pick(trials, 8, memory_gib=80.0, headroom=0.1, free_global_batch=True)
    assert free["recommended"].trial_id == "004"
    assert pick([], 8, memory_gib=None, headroom=0.1)["recommended"] is None


@pytest.mark.parametrize(
    ("rule", "rate"), [("sqrt", 2e-4), ("linear", 4e-4), ("none", 1e-4)]
)
def test_learning_rate_rules(rule, rate):
    assert scaled_learning_rate(1e-4, 4.0, rule) == pytest.approx(rate)


def test_hours_for_the_data():
    before, after = trial("001", 10.0, 1.0), trial("002", 50.0, 1.0)
    times = time_to_train(36_000, 2.0, before, after)
    assert times["hours_before"] == 2.0
    assert times["hours_after"] == pytest.approx(0.4)
    assert time_to_train(36_000, 2.0, None, after)["hours_before"] is None
    assert time_to_train(36_000, 2.0, before, None) is None


def test_tuned_parameters_are_parameters_that_train_the_same():
    chosen = trial(
        "001",
        50.0,
        1.0,
        strategy="packed",
        token_budget=512,
        precision="fp32",
        compile=False,
        cuda_graphs=False,
        num_workers=1,
    )
    base = settings()
    tuned = tuned_parameters(base, chosen)
    assert "global_batch_size" not in tuned["train"]
    assert "learning_rate" not in tuned["train"]
    whole = base.model_dump(mode="json")
    merged = {
        **whole,
        "runtime": {**whole["runtime"], **tuned["runtime"]},
        "train": {**whole["train"], **tuned["train"]},
    }
    parsed = parse_settings(merged).train
    assert (parsed.batching, parsed.token_budget) == ("packed", 512)
    assert parsed.loader.num_workers == 1
    assert parsed.global_batch_size == base.train.global_batch_size


def test_what_differs_between_the_measured_machine_and_this_one():
    here = provenance(settings(), "H200", 1, "abc")
    assert mismatches(here, here) == []
    versions = {**here["versions"], "torch": "2.0"}
    there = {**here, "device": "A100", "token_key": "old", "versions": versions}
    assert mismatches(there, here) == [
        "device A100, here H200",
        "data old, here abc",
        f"torch 2.0, here {here['versions']['torch']}",
    ]


def test_the_median_stands_between_the_slowest_and_the_fastest_trial():
    def promised(*rates):
        found = provenance(settings(), "H200", 1, "abc", rates, gain=2.0)
        names = ("", "_low", "_high", "_before")
        return [found[f"samples_per_s{name}"] for name in names]

    assert promised(100.0, 130.0, 90.0, 110.0) == [105.0, 90.0, 130.0, 52.5]
    assert promised(100.0) == [100.0, None, None, 50.0]


def summary(chosen: TrialResult, changes: bool, gained: bool = True) -> dict:
    rates = [chosen.samples_per_s, 48.0, 52.0]
    source = provenance(settings(), "H200", 1, "abc", rates, gain=2.0)
    return {
        "mode": "tune",
        "rows": 1200,
        "global_batch_size": 8,
        "verdict": {"bound": "compute"},
        "tuned": {
            "parameters": tuned_parameters(settings(), chosen),
            "provenance": source,
            "gained": gained,
            "changes_optimisation": changes,
        },
    }


def test_the_tuned_file_says_where_it_comes_from():
    chosen = trial("001", 50.0, 1.0, strategy="packed", token_budget=512)
    text = parameters_text(summary(chosen, changes=False))
    assert "CHANGES THE OPTIMISATION" not in text
    content = yaml.safe_load(text)
    assert content["train"]["token_budget"] == 512
    assert content["tuned"]["token_key"] == "abc"
    assert (content["tuned"]["device"], content["tuned"]["devices"]) == ("H200", 1)
    rates = [content["tuned"][f"samples_per_s{n}"] for n in ("", "_low", "_before")]
    assert rates == [50.0, 48.0, 25.0]
    assert parameters_text({"tuned": None}) == ""


@pytest.mark.parametrize("gained", [True, False])
def test_the_tuned_file_says_whether_to_train_with_it(gained):
    chosen = trial("001", 50.0, 1.0)
    text = parameters_text(summary(chosen, changes=False, gained=gained))
    assert ("# Train with it" in text) == gained
    assert ("# No faster than the configured settings" in text) != gained


def test_a_change_of_the_optimisation_is_marked():
    chosen = trial("001", 50.0, 1.0, global_batch_size=32)
    text = parameters_text(summary(chosen, changes=True))
    assert "CHANGES THE OPTIMISATION: the global batch goes from 8 to 32" in text
