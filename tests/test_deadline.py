"""Projections from logs of other programs, against figures worked out by hand."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
from click.testing import CliRunner

from flatout import cli
from flatout.engine.parameters import SettingsError
from flatout.reports import training_logs
from flatout.reports.deadline import deadline_lines, project
from flatout.reports.training_logs import parse_line

LOGS = {
    # 100 steps in 50 s of clock: 500 ms a step.
    "dates": [
        f"2026-11-22 23:59:{10 + 5 * n:02d},000 INFO step {10 * n}/10,000 loss 1.0"
        for n in range(10)
    ],
    "clock over midnight": [
        f"[{(23 * 3600 + 3590 + 5 * n) // 3600 % 24:02d}:"
        f"{(23 * 3600 + 3590 + 5 * n) // 60 % 60:02d}:"
        f"{(23 * 3600 + 3590 + 5 * n) % 60:02d}] iteration {10 * n} of 10000"
        for n in range(10)
    ],
    "american dates": [
        f"11/22/26 10:00:{5 * n:02d} Step: {10 * n} / 10000" for n in range(10)
    ],
    "tqdm": [
        "\r".join(
            f" {n}%|# | {10 * n}/10000 [00:{5 * n:02d}<10:00,  2.00it/s]"
            for n in range(10)
        )
    ],
    "json lines": [
        json.dumps({"step": 10 * n, "time_s": 1.7e9 + 5 * n, "max_steps": 10_000})
        for n in range(10)
    ],
    "epochs": [
        f"2026-11-22 10:00:{5 * n:02d} Epoch [{1 + n // 5}/100], "
        f"Step [{10 * n % 50}/100] loss 0.3"
        for n in range(5)
    ],
    "stated rates alone": ["step 90/10000 500 ms", "step 91/10000 2.0 batch/s"],
    "seconds an iteration": ["[90/10000] 0.5 s/it"],
}


def written(folder: Path, lines: list[str], end: str = "\n") -> Path:
    path = folder / "train.log"
    path.write_text("\n".join(lines) + end)
    return path


@pytest.mark.parametrize("kind", LOGS)
def test_steps_and_times_of_common_logs(tmp_path, kind):
    found, left_out = project(written(tmp_path, LOGS[kind]))
    assert found.step_s == pytest.approx(0.5)
    assert (found.total, found.runs, left_out) == (10_000, 1, 0)
    assert found.whole_h == pytest.approx(10_000 * 0.5 / 3600)


def test_guide_as_own_arithmetic(tmp_path):
    """145 ms a batch stated, 233 h 59 min left by its clock: 173 ms."""
    left_s, done, total = 233 * 3600 + 59 * 60, 843_200, 5_702_600
    step_s = left_s / (total - done)
    lines = [
        json.dumps({"step": step, "time_s": 1.7e9 + step * step_s})
        for step in (0, done // 2, done)
    ]
    found, _ = project(written(tmp_path, [*lines, "145 ms a batch"]), total)
    assert found.left_h == pytest.approx(left_s / 3600)
    assert round(1000 * found.step_s) == 173
    told = deadline_lines(found, 72, 0)
    whole_h = total * step_s / 3600
    assert told[0] == (
        f"Too slow: {whole_h:.1f} h in all where 72 h are allowed; it has to be "
        f"{whole_h / 72:.2f} times as fast."
    )
    assert "234.0 h are left at 173.3 ms a step, by the log's clock" in told[1]


def test_pauses_and_several_runs_are_told_of(tmp_path):
    old = ["2026-11-22 08:00:00 step 500/1000 10 ms"]
    new = [f"2026-11-22 10:0{n}:00 step {60 * n}/1000 500 ms" for n in range(5)]
    found, _ = project(written(tmp_path, old + new))
    told = " ".join(deadline_lines(found, 1, 0))
    assert (found.runs, found.step_s, found.stated_s) == (2, 1.0, 0.5)
    assert "In time: 0.3 h in all, of 1 h." in told
    assert "The log states 500.0 ms a step: the rest of the time went into" in told
    assert "The log has 2 runs; these are the last one's figures." in told


def test_a_stop_between_kill_and_resume_is_not_counted(tmp_path):
    times = [60 * n for n in range(10)] + [7 * 3600 + 60 * n for n in range(10)]
    lines = [
        json.dumps({"step": 60 * n, "time_s": 1.7e9 + at, "max_steps": 6000})
        for n, at in enumerate(times)
    ]
    found, _ = project(written(tmp_path, lines))
    stopped_s = 7 * 3600 - 10 * 60  # a minute of it is for steps
    assert found.stopped_s == pytest.approx(stopped_s)
    assert found.step_s == pytest.approx((times[-1] - stopped_s) / (19 * 60))
    told = " ".join(deadline_lines(found, 1, 0))
    assert "One gap of 6.8 h is taken for a stop" in told


@pytest.mark.parametrize(
    ("gaps_s", "stopped_s"),
    [
        ([60, 60, 3600, 60, 60], 0),
        ([60, 60, 3601 + 60, 60, 60], 3601),
        ([60, 60, 7200, 60, 7200], 0),
        ([60, 60, 7200, 60, 3000], 7140),
        ([100, 100, 5000, 100, 100], 0),
        ([100, 100, 5101, 100, 100], 5001),
        ([60, 7200], 0),
    ],
)
def test_a_gap_is_a_stop_where_it_is_long_and_alone(tmp_path, gaps_s, stopped_s):
    """Over an hour, and over 50 medians, beyond its own steps; evaluations return."""
    times = [0, *accumulate(gaps_s)]
    lines = [
        json.dumps({"step": n, "time_s": 1.7e9 + at, "max_steps": 6000})
        for n, at in enumerate(times)
    ]
    found, _ = project(written(tmp_path, lines))
    assert found.stopped_s == pytest.approx(stopped_s)


@pytest.mark.parametrize(
    ("line", "step_ms"),
    [
        ("step 3/10 data 3 ms, 145 ms/step", 145),
        ("step 3/10 batch time: 0.5 ms, data 3 ms", 0.5),
        ("step 3/10 (145.2 ms)", 145.2),
        ("step 3/10 loss 0.2 data_time 3 ms", None),
        ("step 3/10 forward 30 ms backward 60 ms", None),
        ("step 3/10 data time: 3 ms", None),
        ("step 3/10 backward pass 60 ms", None),
        ("step 3/10 train_data_time 3 ms gpu_wait 2 ms", None),
        ("step 1/100 (4000 ms compile)", None),
        ("step 1/100 3 ms loading", None),
        ("step 3/10 eval step time 30 ms", None),
        ("step 3/10 145 ms, wait 3 ms", 145),
        ("step 3/10 145 ms data 3 ms", 145),
        ("step 3/10 took 145 ms and 146 ms", None),
    ],
)
def test_only_the_time_of_a_step_is_taken_for_it(line, step_ms):
    found = parse_line(line).step_s
    assert found == (None if step_ms is None else pytest.approx(step_ms / 1000))


def test_the_bar_of_an_evaluation_is_not_the_trainings(tmp_path):
    lines = [
        " 5%|# | 500/10000 [1:23:20<26:23:20, 10.00s/it]",
        " 60%|###### | 19/32 [00:02<00:01,  9.00it/s]",
    ]
    found, _ = project(written(tmp_path, [" 0%| | 0/10000 [00:00<?]", *lines]))
    assert (found.done, found.total, found.runs, found.step_s) == (500, 10_000, 1, 10.0)


def test_a_line_that_is_cut_and_bytes_that_are_no_text_do_no_harm(tmp_path):
    path = written(tmp_path, LOGS["dates"], end="\n2026-11-22 23:59:59,000 INFO st")
    path.write_bytes(b"\xff\xfe\x00 step\n" + path.read_bytes())
    assert project(path)[0].step_s == pytest.approx(0.5)
    assert project(path)[0].done == 90


def test_a_large_log_is_read_at_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(training_logs, "HEAD_BYTES", 200)
    monkeypatch.setattr(training_logs, "TAIL_BYTES", 400)
    lines = [f"2026-11-22 10:{n // 60:02d}:{n % 60:02d} step {n}" for n in range(1800)]
    path = written(tmp_path, lines)
    found, left_out = project(path, 3600)
    assert left_out == path.stat().st_size - 600
    assert (found.step_s, found.done, found.runs) == (1.0, 1799, 1)
    assert "MiB in its middle were not read" in deadline_lines(found, 1, left_out)[-1]


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_a_run_that_began_in_the_middle_is_not_joined_to_the_one_before(
    tmp_path, monkeypatch, end
):
    """Bars of tqdm in a file have no other end of a line than that of a typewriter."""
    monkeypatch.setattr(training_logs, "HEAD_BYTES", 300)
    monkeypatch.setattr(training_logs, "TAIL_BYTES", 2000)
    monkeypatch.setattr(training_logs, "BLOCK_BYTES", 256)

    def line(day, n):
        clock = f"{n // 60 // 60:02d}:{n // 60 % 60:02d}:{n % 60:02d}"
        return f"2026-11-{day:02d} {clock} step {n}"

    first, second = ([line(day, n) for n in range(3000)] for day in (1, 20))
    path = tmp_path / "train.log"
    text = end.join([f"{first[0]}/5000", *first[1:], *second, second[-1][:22]])
    path.write_text(text, newline="")
    found, left_out = project(path)
    assert (found.step_s, found.done, found.total) == (1.0, 2999, 5000)
    assert (found.runs, found.stopped_s) == (1, 0.0)
    assert left_out == path.stat().st_size - 2300


def test_a_megabyte_without_an_end_is_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(training_logs, "BLOCK_BYTES", 256)
    path = written(tmp_path, [*LOGS["dates"], "x" * 5000, *LOGS["dates"][-1:]])
    assert project(path)[0].step_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["loss 0.5", "no more"], "no line with a step, as `step 100/1000`"),
        (["step 5", "step 6"], "found 2 lines with a step, the last is 6, none says"),
        (["step 5/10", "step 6/10"], r"2 lines with a step \(6 of 10\), but no times"),
    ],
)
def test_what_is_missing_is_said_with_what_was_found(tmp_path, lines, fault):
    with pytest.raises(SettingsError, match=fault):
        project(written(tmp_path, lines))


def test_a_log_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="is no file: give the log of a training"):
        project(tmp_path / "train.log")


def test_the_command_answers_first(tmp_path):
    arguments = ["deadline", str(written(tmp_path, LOGS["tqdm"])), "--hours", "1"]
    answer = CliRunner().invoke(cli.flatout, arguments)
    assert answer.exit_code == 0
    assert answer.output.startswith("Too slow: 1.4 h in all where 1 h are allowed;")
    silent = written(tmp_path, ["loss 0.5"])
    refused = CliRunner().invoke(cli.flatout, ["deadline", str(silent), "--hours", "1"])
    assert refused.exit_code == 2
    assert "no line with a step" in refused.output
