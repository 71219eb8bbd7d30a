"""The guard's verdict: the choice of the baseline, and causes of slow runs."""

from dataclasses import replace

import pytest

from flatout.engine.guard import (
    RATE,
    Difference,
    TrackedRun,
    append_run,
    choose_baseline,
    differences,
    judge,
    read_runs,
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
        (121, "healthy"),
    ],
)
def test_the_healthy_band(rate, state):
    verdict = judged([rate] * 5)
    assert (verdict.state, verdict.rate_pct) == (state, pytest.approx(rate))


def test_step_time_is_reported_beside_the_rate():
    verdict = judged([50.0] * 5, run(step_ms_p50=10.0), step_ms_p50=20.0)
    assert verdict.step_pct == 200
    assert verdict.text.startswith(
        "guard: 50 samples/s in the median window, 50 % of the baseline's 100 (run "
        "name-r0, r0); a step takes 200 % of its step time. No recorded setting differs"
    )


def test_the_first_run_and_a_run_too_short_are_not_judged():
    now, settings = run(), GuardSettings()
    assert judge(now, [90.0] * 3, None, settings).state == "first"
    short = judge(now, [90.0] * 2, run(), settings)
    assert short.state == "unknown"
    assert "only 2 of the" in short.text
    assert typical_rate([1, 2]) is None
    assert typical_rate([1, 9, 2]) == 2


def test_a_disturbed_run_of_the_same_settings_is_no_alarm():
    """Half of the windows are slow because of another program."""
    verdict = judged([40.0] * 5 + [95.0] * 4)
    assert verdict.state == "busy"
    assert "a quarter of its windows reach 95 %" in verdict.text
    starved = judged([40.0] * 9, cpu_wait_pct=50.0)
    assert starved.state == "busy"
    assert "used the cores for 50 % of the time" in starved.text


def test_a_busy_machine_is_no_excuse_for_slow_settings():
    slow = {"attention": "eager"}
    assert judged([40.0] * 9, tags=slow, cpu_wait_pct=50.0).state == "slow"
    assert judged([40.0] * 5 + [95.0] * 4, tags=slow).state == "slow"


def test_what_was_measured_comes_first_then_settings_by_name():
    """`auto` equals its resolved value. Unrelated metrics are left out."""
    verdict = judged(
        [20.0] * 5,
        run(padding_pct=0.0, loader_wait_pct=0.0, gpu_clock_mhz=1980.0),
        tags={
            "precision": "fp32",
            "attention": "eager",
            "strategy": "fixed",
            "token_budget": "32768",
        },
        params={
            "runtime.precision": "fp32",
            "train.max_steps": "20",
            "paths.metrics": "b.jsonl",
        },
        padding_pct=70.0,
        loader_wait_pct=1.0,
        gpu_clock_mhz=990.0,
    )
    assert [
        (d.name, d.then, d.now, d.ratio and round(d.ratio, 2))
        for d in verdict.differences
    ] == [
        ("padding_pct", "0.0", "70.0", 3.33),
        ("gpu_clock_mhz", "1980.0", "990.0", 2.0),
        ("runtime.attention", "flatout_rows", "eager", None),
        ("runtime.precision", "bf16", "fp32", None),
        ("train.batching", "packed", "fixed", None),
        ("train.token_budget", "65536", "32768", None),
    ]
    shown = verdict.text.split("Differences")[1].splitlines()
    assert shown[1].strip() == (
        "padding_pct: 0.0 -> 70.0 (measured, 3.33 times slower: more of each batch is "
        "padding)"
    )
    assert shown[3].strip() == "runtime.attention: flatout_rows -> eager"
    assert shown[0] == " (all 6 are in guard.json):"
    assert len(shown) == 1 + 5 + 1


def test_an_earlier_runs_names_of_parameters_are_todays():
    earlier = run()
    params = {**earlier.params, "train.strategy": "auto"}
    del params["train.batching"]
    assert differences(replace(earlier, params=params), run()) == []


def test_the_baseline_is_the_fastest_of_the_same_precision_and_devices():
    now = run(tags={"precision": "fp32"})
    other = [run(300, "bf16"), run(900, "eight", {"world_size": "8"})]
    like = [run(90, "a", {"precision": "fp32"}), run(110, "b", {"precision": "fp32"})]
    assert choose_baseline([*other, *like], now).run_id == "b"
    assert choose_baseline(other, now).run_id == "eight"  # there is no other run
    assert choose_baseline([TrackedRun("no rate", "n")], now) is None


def test_a_slow_run_is_no_baseline_while_there_is_a_sound_one():
    """A second slow run is not healthy just because the first was slow."""
    now = run(tags={"precision": "fp32"})
    slow = run(20, "slow", {"precision": "fp32", "guard": "slow"})
    fast = run(100, "fast", {"guard": "healthy"})
    assert choose_baseline([slow, fast], now).run_id == "fast"
    assert choose_baseline([slow], now).run_id == "slow"
    named = run(60, "fp32", {"precision": "fp32", "guard": "first"})
    assert choose_baseline([slow, fast, named], now).run_id == "fp32"


def test_what_only_one_run_has_is_a_difference():
    name = "runtime.environment.CUDA_LAUNCH_BLOCKING"
    found = differences(
        run(params={"train.older": "1"}),
        run(tags={"residual": "fp32", "version.cuda": "13"}, params={name: "1"}),
    )
    assert found == [
        Difference(name, "not set", "1"),
        Difference("runtime.residual", "not set", "fp32"),
        Difference("train.older", "1", "not set"),
        Difference("version.cuda", "not set", "13"),
    ]


def test_other_code_alone_is_no_reason_to_blame_settings():
    tags = {"git_commit": "b", "git_dirty": "true"}
    assert judged([40.0] * 9, tags=tags, cpu_wait_pct=50.0).state == "busy"


def test_runs_are_lines_of_a_file(tmp_path):
    """Only runs of the same work on the same device are compared."""
    file = tmp_path / "runs.jsonl"
    assert read_runs(file) == []
    same = {"work_key": "k", "device": "H200"}
    runs = [
        run(100.0, "a", same),
        run(900.0, "b", {**same, "device": "another"}),
        run(900.0, "c", {**same, "work_key": "other"}),
    ]
    for one in runs:
        append_run(file, one)
    with file.open("a") as lines:
        lines.write('{"run_id": "torn')
    assert read_runs(file) == runs
    assert choose_baseline(read_runs(file), run(tags=same)) == runs[0]


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
