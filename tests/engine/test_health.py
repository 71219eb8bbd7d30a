"""Planted problems are reported once each, at the first logging steps."""

import math
import re
import time
from types import SimpleNamespace

import pytest

from flatout.engine.batches.collation import StepRows
from flatout.engine.launch.launch import run_job
from flatout.engine.train.recording import recorder
from flatout.engine.train.recording.health import Conditions, find_problems
from flatout.engine.train.recording.report import LogPoint
from tests.engine.runs import CPU, NO_DROPOUT, changed, make_job


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that trains with a problem. It returns the warnings, each with
    its logging step, and the report's warnings."""

    def of(steps=12, **options):
        threads = options.pop("threads", 1)
        found, job = [], make_job(tmp_path, epochs=20, max_steps=steps, **options)
        job = changed(job, runtime={"threads": threads})
        judge = recorder.Recorder.check_health

        def noted(self):
            before = len(self.problems)
            judge(self)
            new = list(self.problems.values())[before:]
            found.extend((self.history[-1].step, text) for text in new)

        monkeypatch.setattr(recorder.Recorder, "check_health", noted)
        return found, run_job(job).report.warnings

    return of


def only(found, pattern: str) -> int:
    """Return the step of the only warning that matches."""
    (step,) = [step for step, text in found if re.search(pattern, text)]
    return step


def test_a_loss_far_above_chance_and_exploding_gradients_are_told(told):
    config = {"initializer_range": 3.0, **NO_DROPOUT}
    found, reported = told(config=config, learning_rate=1e-9)
    assert only(found, r"^the first loss is [\d.]+, chance is 1\.10") == 3
    assert sum("the first loss is" in text for text in reported) == 1
    step = only(found, "gradient norm is unusually high: .* Lower train.learning_rate")
    assert step == 9


def test_vanishing_gradients_are_told_at_the_third_log_point(told):
    found, _ = told(
        config={"initializer_range": 1e-6, **NO_DROPOUT}, freeze=["classifier"]
    )
    assert only(found, "gradient norm is unusually low: .* Little is learned") == 9


@pytest.mark.parametrize(
    ("losses", "warned"),
    [([1.1, 1.08, 1.07], True), ([1.1, 0.6, 0.2], False), ([0.03, 0.03, 0.03], False)],
)
def test_small_gradients_of_a_model_that_has_learnt_are_no_illness(losses, warned):
    """Chance is a loss of 1.10 for three classes. The last model was already
    trained."""
    rates = dict.fromkeys(("samples_per_s", "tokens_per_s", "padded_tokens_per_s"), 9.0)
    points = [
        LogPoint(n, n / 10, loss, 1e-3, 0.01, **rates, loader_wait_pct=0, elapsed_s=n)
        for n, loss in enumerate(losses, 1)
    ]
    run = SimpleNamespace(
        trainer=SimpleNamespace(runtime=CPU),
        **{"history": points, "windows": [], "loader": None},
        **{"initial_loss": losses[0], "chance_loss": math.log(3)},
        conditions=Conditions(CPU),
    )
    assert ("unusually low" in str(find_problems(run)["norm"])) is warned


def test_a_starved_loader_is_told_of_with_what_to_do(told, monkeypatch):
    lay_out = StepRows.__getitem__

    def slow(self, step):
        time.sleep(0.1)
        return lay_out(self, step)

    monkeypatch.setattr(StepRows, "__getitem__", slow)
    found, _ = told(steps=15, loader={"num_workers": 0})
    step = only(found, "steps waited for the loader .* raise train.loader.num_workers")
    assert step <= 5 * 3


def test_a_neighbour_on_the_cores_is_told_of(told, monkeypatch):
    figures = Conditions.figures
    monkeypatch.setattr(
        Conditions, "figures", lambda self: figures(self) | {"cpu_wait_pct": 60.0}
    )
    found, _ = told(threads=2)
    assert only(found, "for 60 % of the time this process waited for a core") == 3


def test_a_healthy_training_is_told_of_nothing(told):
    found, reported = told(steps=24, config={"initializer_range": 0.05})
    ill = [t for _, t in found if "loader" not in t and "core" not in t]
    assert ill == []
    assert not [text for text in reported if "gradient" in text or "loss" in text]


def test_health_is_judged_at_evaluations_too(told, monkeypatch):
    """This is about the steps after the first logging steps (3 to 15): the evaluations
    at steps 20 and 30 report the problems of steps 18 and 30."""
    looked = []

    def noted(self):
        looked.append(self.history[-1].step)
        return find_problems(self)

    monkeypatch.setattr(recorder, "find_problems", noted)
    told(steps=30, evaluate_every=10)
    assert looked[:4] == [3, 6, 9, 9]
    assert {18, 30} <= set(looked)
