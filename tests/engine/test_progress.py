"""The progress line: its contents, its frequency, and the prediction in it."""

import logging

import pytest

from flatout.engine.machine.runtime import set_up
from flatout.engine.train.loop import evaluation_due, train
from flatout.engine.train.recording.progress import (
    Progress,
    duration,
    evaluations,
    progress_line,
)
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.recording.timing import Window
from flatout.engine.train.setup.assemble import assemble
from tests.engine.runs import make_job


def window(samples: int, wall_s: float, steps: int = 10) -> Window:
    return Window(steps, samples, 900, 1000, 0, samples, wall_s, 0.0, [], True)


def point(step: int, samples_per_s: float = 100.0, elapsed_s: float = 1.0) -> LogPoint:
    return LogPoint(step, 1, 0.5, 1e-3, 1.0, samples_per_s, 900, 1000, 2.5, elapsed_s)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """12 steps of 16 samples. Steps 4, 8 and 12 validate 20 rows; 21 are tested."""
    job = make_job(tmp_path_factory.mktemp("job"), deadline_hours=100 / 3600)
    return assemble(job, set_up(job.settings.runtime))


def test_the_line_names_rate_mean_padding_wait_memory_and_time_left():
    windows = [window(100, 1.0), window(100, 3.0)]
    assert progress_line(point(40), 900, windows, 1.26, 200.4) == (
        "step 40/900  3 min 20 s left  loss 0.5000  100 samples/s (mean 50)"
        "  loader wait 2.5 %  padding 10 %  1.3 GiB"
    )
    warming = progress_line(point(2, float("nan")), 900, [], 1.0, float("nan"))
    assert warming == "step 2/900  loss 0.5000  1.0 GiB  (no rate yet)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45.2, "45 s"), (60, "1 min 00 s"), (59.7, "1 min 00 s"), (18420, "5 h 07 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("every", [None, 1, 4, 5, 12, 20])
def test_evaluations_ahead_are_those_that_the_loop_makes(every):
    due = {s for s in range(1, 13) if (every and s % every == 0) or s == 12}
    for after in range(13):
        ahead = sum(1 for step in due if step > after)
        assert evaluations(after, 12, 12, every) == ahead


def test_time_left_counts_steps_evaluations_and_the_test(trainer):
    assert [s for s in range(1, 13) if evaluation_due(trainer, s)] == [4, 8, 12]
    progress, windows = Progress(trainer), [window(160, 10.0)]  # 1 s per step
    # Without a measurement, a row is assumed to take a third of its 1/16 s in training.
    left_s = progress._left_s(2, windows, 0, 0.0)
    assert left_s == pytest.approx(10 + (3 * 20 + 21) / 16 / 3)
    # The two evaluations after steps 4 and 8 took 8 s: 0.2 s per row.
    left_s = progress._left_s(10, windows, 0, 8.0)
    assert left_s == pytest.approx(2 + (20 + 21) * 0.2)
    # A session that began at step 6 has only evaluated after step 8.
    left_s = progress._left_s(10, windows, 6, 8.0)
    assert left_s == pytest.approx(2 + (20 + 21) * 0.4)


def test_a_deadline_that_will_be_missed_is_told_of_once(trainer, caplog):
    caplog.set_level(logging.WARNING)
    progress = Progress(trainer)
    progress.window(point(2, elapsed_s=90), [window(160, 10.0)], 0, 0.0)
    assert caplog.text == ""  # one window is not enough for a prediction
    for step in (4, 6):
        progress.window(point(step, elapsed_s=95), [window(160, 10.0)] * 2, 0, 0.0)
    [record] = caplog.records
    assert record.message.startswith("At this rate training takes 1 min 45 s")
    assert "kedro run --pipelines=benchmark" in record.message


def test_without_a_terminal_the_first_and_the_last_line_of_a_short_run(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    job = make_job(tmp_path, epochs=1, log_every=1)
    train(job, set_up(job.settings.runtime))
    said = [r.message for r in caplog.records if r.name.endswith("recording.progress")]
    assert [line.split("  ")[0] for line in said] == ["step 1/4", "step 4/4"]
