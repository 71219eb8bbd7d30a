"""The measurements of a trial, which runs in this process on tiny rows."""

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import psutil
import pytest
import torch

from flatout.engine.benchmark.measuring import (
    interleaved,
    measure,
    probes,
    windows,
)
from flatout.engine.benchmark.measuring.driver import (
    BlockRows,
    Driver,
    representative_block,
)
from flatout.engine.benchmark.measuring.phases import PHASES, PhaseClock
from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import BenchmarkSettings
from flatout.engine.train.recording.timing import Window
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.step import Stepper
from tests.engine.benches import job_files, settings, spec
from tests.engine.families import step_rows, token_rows


@pytest.fixture
def job(tmp_path):
    return job_files(tmp_path).open(settings(), tmp_path)


def trainer_of(job, **changes):
    changed = with_changes(job.settings, changes)
    return assemble(replace(job, settings=changed), set_up(changed.runtime))


STEP_S = 0.05


def test_a_training_measured_end_to_end(job, tmp_path, monkeypatch):
    """Each step has 8 samples and sleeps, which limits the rate. The rate is not much
    lower, because a step does little else."""

    def slow_step(stepper, batch):
        time.sleep(STEP_S)
        samples.append(batch.num_samples)
        return step(stepper, batch)

    samples, step = [], Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", slow_step)
    asked = spec("end_to_end")
    figures = measure.end_to_end(asked, job, tmp_path)
    assert set(samples) == {8}
    rates = figures["window_samples_per_s"]
    taken = len(rates)
    assert asked.measure.repeats <= taken <= 2 * asked.measure.repeats + 1
    assert all(0.2 * 8 / STEP_S < rate <= 8 / STEP_S for rate in rates)
    assert figures["samples_per_s"] == sorted(rates)[(taken - 1) // 2]
    assert figures["total_ms"] == pytest.approx(8000 / figures["samples_per_s"])
    assert figures["total_ms"] >= 1000 * STEP_S
    assert all(figures[f"{phase}_ms"] > 0 for phase in PHASES)
    assert figures["io_ms"] > 0
    assert figures["block_steps"] == 3
    assert (figures["strategy"], figures["token_budget"]) == ("packed", 8192)
    assert (figures["host_ms"], figures["gpu_util_pct"]) == (None, None)


def test_a_further_process_has_the_rates_and_no_phases(job, tmp_path):
    figures = measure.again(spec("again"), job, tmp_path)
    whole = measure.end_to_end(spec("end_to_end"), job, tmp_path)
    assert 2 <= len(figures["window_samples_per_s"]) <= 6
    resolved = ("strategy", "token_budget", "num_workers", "precision", "compile")
    assert [figures[name] for name in resolved] == [whole[name] for name in resolved]
    assert not {f"{phase}_ms" for phase in PHASES} & figures.keys()


def test_compute_alone_never_waits(job, tmp_path):
    figures = measure.compute(spec("compute"), job, tmp_path)
    assert figures["io_ms"] == 0.0
    assert figures["samples_per_s"] > 0


def test_the_phases_make_the_step_that_training_makes(job):
    weights = []
    for phased in (False, True):
        trainer = trainer_of(job, **{"train.batching": "grouped"})
        trainer.model.eval()  # no dropout, so that both agree
        clock = PhaseClock(trainer.runtime.device)
        for index in range(3):
            batch = trainer.data[index]
            with clock.on(trainer.stepper) if phased else nullcontext():
                trainer.stepper(batch)
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert all(clock.total_ms(phase) > 0 for phase in PHASES)


def test_a_block_of_few_steps_has_the_mean_length_of_all():
    data = step_rows(
        "bert",
        "sequence-classification",
        "grouped",
        rows=token_rows("sequence-classification", 600),
    )
    first, steps = representative_block(data.rows, data.batches, 4)
    rows = np.concatenate([data.batches.rows(s) for s in range(first, first + steps)])
    mean = data.rows.facts.mean_length
    assert steps == 4
    assert data.rows.lengths(rows).mean() == pytest.approx(mean, rel=0.01)


def test_every_pass_goes_over_the_same_rows():
    data = step_rows("bert", "sequence-classification", "grouped")  # two steps
    block = BlockRows.of(data, 50)
    assert block.period == 2
    ids = [block[index].row_ids.tolist() for index in range(4)]
    assert ids[:2] == ids[2:]
    assert [block[index].step for index in range(4)] == [0, 1, 2, 3]


def window(wall_s: float, clean: bool = True) -> Window:
    return Window(2, 16, 100, 100, 1000, 16, wall_s, 0.0, [1.0], clean)


WALLS = {
    "steady": [1.0, 1.02, 1.01, 9.0],
    "noisy": [1.0, 1.4, 1.2, 0.9, 1.3, 1.1, 1.5, 9.0],
    "compilations": [1.0, None, None, 1.01, 1.02, 9.0],
    "nothing else": [None] * 7 + [9.0],
}
"""Seconds of successive windows. None is a window of 0.5 s with a compilation."""


@pytest.mark.parametrize(
    ("walls", "taken", "count", "median_s"),
    [
        (WALLS["steady"], 3, 3, 1.01),
        (WALLS["noisy"], 7, 7, 1.2),
        (WALLS["compilations"], 5, 3, 1.01),
        (WALLS["nothing else"], 7, 7, 0.5),
    ],
    ids=WALLS,
)
def test_windows_are_taken_until_they_are_together(walls, taken, count, median_s):
    own = Scripted(walls)
    ours = own.windows()
    assert len(walls) - len(own.walls) == taken
    assert len(ours) == count
    assert windows.rate(windows.middle(ours)) == pytest.approx(16 / median_s)


class Scripted(windows.WarmTraining):
    """Windows with known durations."""

    def __init__(self, walls):
        self.walls, self.measure = list(walls), BenchmarkSettings(repeats=3)

    _runtime = set_up(settings().runtime)

    def time_step(self):
        return 1.0

    def shorten(self, steps):
        pass

    def window(self):
        wall_s = self.walls.pop(0)
        return window(wall_s or 0.5, clean=wall_s is not None)


def test_one_turn_of_many_does_not_make_them_unsteady():
    times = [1.0, 0.05, 0.97, 1.0, 0.99, 0.91, 0.95]
    assert interleaved.middle_half_pct(times) == pytest.approx(100 * 0.065 / 0.97)
    assert interleaved.middle_half_pct([2.0]) == 0.0


@dataclass
class Told:
    """A baseline with given throughputs. None is a window with a compilation."""

    rates: list[float | None]
    calls: list[str] = field(default_factory=list)

    def answer(self):
        self.calls.append("below warm")

    def ask(self, method, *arguments):
        self.calls.append(" ".join(["below", method, *map(str, arguments)]))
        if method == "time_step":
            return 0.5
        if method == "window_after_rest":
            rate = self.rates.pop(0)
            return window(16 / (rate or 1.0), clean=rate is not None)
        return None


TWICE = BenchmarkSettings(repeats=2)


@dataclass
class Counted:
    """Warm training whose windows all have 16 samples/s."""

    calls: list[str]
    measure: BenchmarkSettings = TWICE

    def time_step(self):
        self.calls.append("time")
        return 0.1

    def shorten(self, steps):
        self.calls.append(f"shorten {steps}")

    def window_after_rest(self):
        self.calls.append("window")
        return window(1.0)


def pairs_of(rates):
    baseline = Told([*rates, 1.0])
    found = interleaved.interleave(Counted(baseline.calls), baseline)
    assert baseline.rates == [1.0]
    return found, baseline.calls


@pytest.mark.parametrize(
    ("rates", "times"),
    [
        ([8.0, 8.0], [2.0, 2.0]),
        ([8.0, None, 8.0], [2.0, 2.0]),  # a compilation invalidates a pair
        ([8.0, 4.0, 8.0, 8.0, 8.0], [2.0, 4.0, 2.0, 2.0, 2.0]),  # until there are five
    ],
)
def test_turns_are_taken_until_their_ratios_are_together(rates, times):
    assert [pair.ratio for pair in pairs_of(rates)[0]] == times


def test_both_go_over_the_rows_that_the_slower_one_has_time_for():
    _, calls = pairs_of([8.0, 8.0])
    before = ["below warm", "time", "below time_step"]
    same, mine = ["shorten 5", "below shorten 5"], ["window"]
    assert calls == [*before, *same, *mine, *["below window_after_rest"] * 2, *mine]


def test_what_was_loaded_in_a_rest_is_thrown_away(job):
    trainer = trainer_of(job, **{"train.loader.num_workers": 1})
    warm = windows.WarmTraining.up(
        trainer, partial(measure.loaded_feed, trainer), TWICE
    )
    warm.shorten(2)
    taken, feed = [], warm.feed
    feed.batches = (taken.append(batch.step) or batch for batch in feed.batches)
    warm.discard_ready_batches()
    ahead = trainer.job.settings.train.loader.prefetch_factor
    assert len(taken) == ahead + 1
    assert warm.feed.period == 2


def test_a_loaders_workers_end_with_it(job):
    """They end immediately. Python's garbage collector would wait 5 s for each."""
    trainer = trainer_of(job, **{"train.loader.num_workers": 2})
    feed, driver = measure.loaded_feed(trainer, 2), Driver(trainer)
    workers = set(psutil.Process().children())
    gc.disable()
    try:
        feed.step(driver)
        workers = set(psutil.Process().children()) - workers
        assert len(workers) == 2
        del feed
        assert not workers & set(psutil.Process().children())
    finally:
        gc.enable()


def test_the_loader_alone(job, tmp_path):
    figures = probes.loader(spec("loader"), job, tmp_path)
    assert figures["loader_samples_per_s"] > 0
    assert figures["num_workers"] == 0


def test_a_profile_leaves_a_trace_and_a_table(job, tmp_path):
    figures = probes.profile(spec("profile"), job, tmp_path)
    assert set(figures["files"]) == {"trace", "operators"}
    assert "aten::addmm" in (tmp_path / "operators.txt").read_text()
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert "perfetto" in figures["files"]["trace"]["view"]


def test_slow_habits_are_taken_with_the_steps(job):
    """There is one line per step with its loss. Without the setting, nothing is
    stored."""
    slow = {"train.synchronize_every_step": True, "train.history": "dataframe"}
    driver = Driver(trainer_of(job, **slow))
    losses = []
    for step in range(3):
        driver.step(driver.trainer.data[step], 0.0)
        losses.append(float(driver.trainer.stepper.sums.last_loss))
    table = driver.recorder.table
    assert table["step"].tolist() == [0, 1, 2]
    assert table["loss"].tolist() == losses
    assert Driver(trainer_of(job)).recorder.table is None
