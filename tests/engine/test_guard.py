"""The guard's judgement: which earlier run counts, what is slow, what is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.engine.guard.causes import differences
from flatout.engine.guard.comparison import (
    RATE,
    TrackedRun,
    choose_baseline,
    judge,
    typical_rate,
    work_key,
)
from flatout.engine.parameters import GuardSettings, parse_settings

FAST = {
    "precision": "bf16",
    "attention": "flatout_rows",
    "strategy": "packed",
    "world_size": "1",
    "token_budget": "65536",
    "compile": "True",
    "cuda_graphs": "True",
    "gpus": "1",
}
PARAMS = {
    "runtime.precision": "auto",
    "runtime.tf32": "True",
    "train.batching": "auto",
    "train.synchronize_every_step": "False",
    "train.log_every": "20",
    "train.max_steps": "None",
    "paths.metrics": "a.jsonl",
}


def run(rate: float = 100.0, run_id: str = "r0", tags=(), params=(), **report: float):
    return TrackedRun(
        run_id,
        f"name-{run_id}",
        {**PARAMS, **dict(params)},
        {**FAST, **dict(tags)},
        {RATE: rate, **report},
    )


def judged(rates, baseline=None, tags=(), params=(), **report: float):
    now = run(run_id="now", tags=tags, params=params, **report)
    settings = GuardSettings()
    return judge(now, rates, run() if baseline is None else baseline, settings)


@pytest.mark.parametrize(
    ("rate", "state"),
    [
        (79.9, "slow"),
        (80, "healthy"),
        (100, "healthy"),
        (120, "healthy"),
        (121, "fast"),
    ],
)
def test_the_healthy_band(rate, state):
    verdict = judged([rate] * 5)
    assert (verdict.state, verdict.rate_pct) == (state, pytest.approx(rate))


def test_step_time_is_reported_beside_the_rate():
    mean = {"samples_per_s": 40.0}
    verdict = judged([50.0] * 5, run(step_ms_p50=10.0), step_ms_p50=20.0, **mean)
    assert verdict.step_pct == 200
    assert verdict.text.startswith(
        "guard: 50 samples/s in the median window (mean 40), 50 % of the baseline's "
        "100 (run name-r0, r0); a step takes 200 % of its time. Healthy is 80 to 120 %"
        ". Nothing that is recorded"
    )


def test_the_first_run_and_a_run_too_short_are_not_judged():
    now, settings = run(), GuardSettings()
    assert judge(now, [90.0] * 3, None, settings).state == "first"
    short = judge(now, [90.0] * 2, run(), settings)
    assert short.state == "unknown"
    assert "2 windows behind the warm-up are too few" in short.text
    assert typical_rate([1, 2]) is None
    assert typical_rate([1, 9, 2]) == 2


def test_a_disturbed_run_of_the_same_settings_is_no_alarm():
    """Half of the windows fell into another program's work."""
    verdict = judged([40.0] * 5 + [95.0] * 4)
    assert verdict.state == "busy"
    assert "a quarter of its windows reach 95 %" in verdict.text
    starved = judged([40.0] * 9, cpu_wait_pct=50.0)
    assert starved.state == "busy"
    assert "no core for 50 % of the time" in starved.text


def test_cores_that_were_slower_are_no_alarm():
    """A neighbour on the same processor: nothing on this machine shows it."""
    before = run(cpu_probe_ms=4.0)
    verdict = judged([70.0] * 9, before, cpu_probe_ms=5.0)
    assert verdict.state == "busy"
    assert (
        "No alarm: a fixed piece of work beside the steps took 125 % " in verdict.text
    )
    assert judged([50.0] * 9, before, cpu_probe_ms=5.0).state == "slow"
    slow = {"attention": "eager"}
    assert judged([70.0] * 9, before, tags=slow, cpu_probe_ms=5.0).state == "slow"


def test_a_busy_machine_is_no_excuse_for_slow_settings():
    slow = {"attention": "eager"}
    assert judged([40.0] * 9, tags=slow, cpu_wait_pct=50.0).state == "slow"
    assert judged([40.0] * 5 + [95.0] * 4, tags=slow).state == "slow"


def test_what_differs_comes_likeliest_first():
    """`auto` and what it came to are one; parameters of no effect come last."""
    verdict = judged(
        [20.0] * 5,
        run(padding_pct=0.0, loader_wait_pct=0.0, gpu_clock_mhz=1980.0),
        tags={
            "precision": "fp32",
            "attention": "eager",
            "strategy": "fixed",
            "cuda_graphs": "False",
            "token_budget": "32768",
        },
        params={
            "runtime.precision": "fp32",
            "train.synchronize_every_step": "True",
            "train.log_every": "1",
            "train.max_steps": "20",
            "paths.metrics": "b.jsonl",
        },
        padding_pct=70.0,
        loader_wait_pct=1.0,
        gpu_clock_mhz=990.0,
    )
    assert [
        (d.name, d.then, d.now, round(d.factor, 2)) for d in verdict.differences
    ] == [
        ("runtime.precision", "bf16", "fp32", 4.0),
        ("train.batching", "packed", "fixed", 3.33),
        ("train.cuda_graphs", "True", "False", 2.9),
        ("runtime.attention", "flatout_rows", "eager", 2.2),
        ("train.synchronize_every_step", "False", "True", 2.0),
        ("gpu_clock_mhz", "1980.0", "990.0", 2.0),
        ("train.log_every", "20", "1", 1.2),
        ("train.token_budget", "65536", "32768", 1.15),
    ]
    shown = verdict.text.split("likeliest first:")[1].splitlines()
    assert shown[1].strip() == (
        "runtime.precision: bf16 -> fp32 (up to 4.0 times slower: no fast matrix units)"
    )
    assert shown[6] == "  and 3 more, in guard.json"


def test_an_earlier_runs_names_of_parameters_are_todays():
    earlier = run()
    params = {**earlier.params, "train.strategy": "auto"}
    del params["train.batching"]
    assert differences(replace(earlier, params=params), run()) == []


def test_on_a_cpu_what_only_a_gpu_has_is_blamed_last():
    cpu = {"gpus": "0", "precision": "fp32", "cuda_graphs": "False", "compile": "False"}
    found = differences(
        run(tags=cpu),
        run(
            tags={**cpu, "attention": "eager"},
            params={"runtime.tf32": "False", "runtime.precision": "fp32"},
        ),
    )
    assert [(d.name, d.factor) for d in found] == [
        ("runtime.attention", 2.2),
        ("runtime.tf32", 1.0),
    ]


def test_a_change_for_the_better_is_not_blamed():
    slow = {"attention": "eager", "strategy": "fixed", "world_size": "1"}
    found = differences(run(tags=slow), run(tags={"world_size": "8"}))
    assert {d.factor for d in found} == {1.0}
    [fewer] = differences(run(tags={"world_size": "8"}), run(tags={"world_size": "2"}))
    assert fewer.factor == 4


def test_the_baseline_is_the_fastest_of_the_same_precision_and_devices():
    now = run(tags={"precision": "fp32"})
    other = [run(300, "bf16"), run(900, "eight", {"world_size": "8"})]
    like = [run(90, "a", {"precision": "fp32"}), run(110, "b", {"precision": "fp32"})]
    assert choose_baseline([*other, *like], now).run_id == "b"
    assert choose_baseline(other, now).run_id == "eight"  # there is no other
    assert choose_baseline([TrackedRun("no rate", "n")], now) is None


def test_a_slow_run_is_no_baseline_while_there_is_a_sound_one():
    """A second slow run in fp32 is not healthy because the first was as slow."""
    now = run(tags={"precision": "fp32"})
    slow = run(20, "slow", {"precision": "fp32", "guard": "slow"})
    fast = run(100, "fast", {"guard": "healthy"})
    assert choose_baseline([slow, fast], now).run_id == "fast"
    assert choose_baseline([slow], now).run_id == "slow"
    named = run(60, "fp32", {"precision": "fp32", "guard": "first"})
    assert choose_baseline([slow, fast, named], now).run_id == "fp32"


def test_a_faster_run_is_the_baseline_unless_another_is_named():
    assert judged([200.0] * 5).text.endswith("It is the baseline from now on")
    settings = GuardSettings(baseline="r0")
    verdict = judge(run(run_id="now"), [200.0] * 5, run(), settings)
    assert "guard.baseline still names the slower run" in verdict.text


def test_what_only_one_run_has_is_a_difference():
    variables = "runtime.environment."
    found = differences(
        run(params={variables + "GOMP_SPINCOUNT": "10000", "train.older": "1"}),
        run(
            tags={"residual": "fp32", "git_dirty": "true", "world_size": "2"},
            params={variables + "CUDA_LAUNCH_BLOCKING": "1", variables + "OTHER": "1"},
        ),
    )
    assert [(d.name.removeprefix(variables), d.then, d.now, d.factor) for d in found][
        :1
    ] == [("CUDA_LAUNCH_BLOCKING", "not set", "1", 2.0)]
    unknown = {d.name for d in found if d.reason == "effect unknown"}
    assert unknown == {
        "runtime.residual",
        "git_dirty",
        "train.older",
        variables + "OTHER",
    }
    slower = {d.name: d.reason for d in found}
    assert slower["world_size"] == "as a rule no slower here"
    assert str(found[-3]).endswith("(effect unknown)")


def test_the_residual_stream_and_uncommitted_files_are_causes_too():
    then = run(tags={"residual": "bf16", "git_dirty": "false"})
    now = run(tags={"residual": "fp32", "git_dirty": "true"})
    assert [(d.name, d.factor) for d in differences(then, now)] == [
        ("runtime.residual", 1.035),
        ("git_dirty", 1.01),
    ]
    assert [d.factor for d in differences(now, then)] == [1.01, 1.0]


def test_the_same_work_in_another_way_has_the_same_key():
    def key(tokens="t", **parameters):
        model = parameters.pop("model", {"config": {"model_type": "bert"}})
        return work_key(parse_settings({"model": model, **parameters}), tokens)

    other_way = key(
        runtime={"precision": "fp32", "attention": "eager", "threads": 1},
        train={"batching": "fixed", "epochs": 9, "loader": {"num_workers": 0}},
    )
    assert other_way == key()
    others = {
        key(tokens="u"),
        key(train={"global_batch_size": 8}),
        key(tokenize={"max_length": 64}),
        key(model={"config": {"model_type": "bert", "hidden_size": 8}}),
    }
    assert len(others | {key()}) == 5
