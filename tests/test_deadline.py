"""Predictions from logs of other programs, compared with values computed by hand."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from flatout import cli
from flatout.engine.parameters import SettingsError
from flatout.reports.deadline import deadline_lines, newest_run

LOGS = {
    # 100 steps in 50 s are 500 ms per step.
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
    "epochs": [
        f"2026-11-22 10:00:{5 * n:02d} Epoch [{1 + n // 5}/100], "
        f"Step [{10 * n % 50}/100] loss 0.3"
        for n in range(5)
    ],
}


def written(folder: Path, lines: list[str], end: str = "\n") -> Path:
    path = folder / "train.log"
    path.write_text("\n".join(lines) + end)
    return path


@pytest.mark.parametrize("kind", LOGS)
def test_steps_and_times_of_common_logs(tmp_path, kind):
    answer, rest = deadline_lines(written(tmp_path, LOGS[kind]), 2)
    assert answer == "In time: the run takes 1.4 h of 2 h."
    assert " of 10,000 steps are done, 1.4 h are left at 500.0 ms a step" in rest
    assert rest.endswith("run 1 of the log.")


def test_figures_behind_the_last_step_are_no_step(tmp_path):
    """The line of phases in the output of `kedro run` contains "steps 0.40", in
    seconds."""
    log = tmp_path / "log"
    log.write_text("10:00:00  step 4/8\n10:00:04  step 8/8\n10:00:05  steps 0.40\n")
    run = newest_run(log)
    assert (run.number, run.done, run.total) == (1, 8, 8)


def test_guide_as_own_arithmetic(tmp_path):
    """The log states 145 ms per batch, but its times amount to 173 ms and 233 h 59
    min."""
    left_s, done, total = 233 * 3600 + 59 * 60, 843_200, 5_702_600
    step_s = left_s / (total - done)
    lines = [
        f"{datetime(2026, 1, 2) + timedelta(seconds=round(step * step_s))} step {step}"
        for step in (0, done // 2, done)
    ]
    log = written(tmp_path, [*lines, "145 ms a batch"])
    told = deadline_lines(log, 72, total)
    whole_h = total * step_s / 3600
    assert told[0].startswith(
        f"Too slow: the run takes {whole_h:.1f} h, but only 72 h are allowed. It has "
        f"to be {whole_h / 72:.2f} times as fast."
    )
    assert "234.0 h are left at 173.3 ms a step" in told[1]


def test_pauses_count_and_the_newest_run_is_told_of(tmp_path):
    old = ["2026-11-22 08:00:00 step 500/1000 10 ms"]
    new = [f"2026-11-22 10:0{n}:00 step {60 * n}/1000 500 ms" for n in range(5)]
    log = written(tmp_path, old + new)
    run = newest_run(log)
    assert (run.number, run.done, run.total, run.step_s) == (2, 240, 1000, 1.0)
    assert deadline_lines(log, 1)[0] == "In time: the run takes 0.3 h of 1 h."
    assert deadline_lines(log, 1)[1].endswith("run 2 of the log.")


def test_the_bar_of_an_evaluation_is_not_the_trainings(tmp_path):
    lines = [
        " 0%| | 0/10000 [00:00<?]",
        " 5%|# | 500/10000 [1:23:20<26:23:20, 10.00s/it]",
        " 60%|###### | 19/32 [00:02<00:01,  9.00it/s]",
    ]
    run = newest_run(written(tmp_path, lines))
    assert (run.done, run.total, run.number, run.step_s) == (500, 10_000, 1, 10.0)


def test_a_line_that_is_cut_and_bytes_that_are_no_text_do_no_harm(tmp_path):
    path = written(tmp_path, LOGS["dates"], end="\n2026-11-22 23:59:59,000 INFO st")
    path.write_bytes(b"\xff\xfe\x00 step\n2026-13-45 99:00:00\n" + path.read_bytes())
    assert newest_run(path).step_s == pytest.approx(0.5)
    assert newest_run(path).done == 90


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["loss 0.5", "no more"], "no line with a step, such as `step 100/1000`"),
        (["step 5", "step 6"], "the last step is 6; it lacks the number of steps"),
        (["step 5/10", "step 6/10"], "6; it lacks two steps with different times"),
        (["10:00:00 step 5/9", "10:00:00 step 6/9"], "it lacks two steps with diff"),
    ],
)
def test_what_is_missing_is_said_with_what_was_found(tmp_path, lines, fault):
    with pytest.raises(SettingsError, match=fault):
        deadline_lines(written(tmp_path, lines), 1)


def test_a_log_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="is not a file: give the log of a run"):
        deadline_lines(tmp_path / "train.log", 1)


def test_the_command_answers_first(tmp_path):
    arguments = ["deadline", str(written(tmp_path, LOGS["tqdm"])), "--hours", "1"]
    answer = CliRunner().invoke(cli.flatout, arguments)
    assert answer.exit_code == 1
    assert answer.output.startswith(
        "Too slow: the run takes 1.4 h, but only 1 h are allowed."
    )
    in_time = CliRunner().invoke(cli.flatout, [*arguments[:-1], "2"])
    assert in_time.exit_code == 0 and in_time.output.startswith("In time:")
    for wrong in ("0", "nan"):
        refused = CliRunner().invoke(cli.flatout, [*arguments[:-1], wrong])
        assert refused.exit_code == 2 and "a number above 0" in refused.output
    silent = written(tmp_path, ["loss 0.5"])
    refused = CliRunner().invoke(cli.flatout, ["deadline", str(silent), "--hours", "1"])
    assert refused.exit_code == 2
    assert "no line with a step" in refused.output
