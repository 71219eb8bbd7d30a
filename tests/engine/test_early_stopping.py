"""Which evaluation is the best, and when a training run ends early."""

import json
from dataclasses import replace

import pyarrow.compute as pc
import pytest
from pydantic import ValidationError

from flatout.engine.launch.launch import run_job
from flatout.engine.parameters import SettingsError, TrainSettings, parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tasks import check_options
from flatout.engine.train import loop
from tests.engine.runs import Crash, crash, curve, make_job, points, when_logged

JUMPS = {
    "epochs": 6,
    "token_budget": 240,
    "learning_rate": 3e-2,
    "schedule": "constant",
    "evaluate_every": 2,
    "log_every": 5,
    "checkpoint": {"every_steps": 2, "keep": 2},
}


def evaluations(job) -> list[dict]:
    """Return the metrics of each evaluation, with its step."""
    found = map(json.loads, job.metrics_file.read_text().splitlines())
    return [
        {"step": point["step"], **point["metrics"]}
        for point in found
        if "validation_loss" in point["metrics"]
    ]


def stop_of(values: list[float], patience: int) -> int:
    """Return the number of the evaluation that ends the run if lower `values` are
    better."""
    for place in range(len(values)):
        since = place - values.index(min(values[: place + 1]))
        if since >= patience:
            return place
    raise AssertionError("these values never stop")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The training run without early stopping."""
    job = make_job(tmp_path_factory.mktemp("whole"), **JUMPS)
    return run_job(job), evaluations(job)


@pytest.mark.parametrize("metric", ["f1_macro", "matthews"])
def test_the_best_model_is_that_of_the_highest_metric(tmp_path, whole, metric):
    _, found = whole
    best = max(found, key=lambda point: point[f"validation_{metric}"])
    result = run_job(make_job(tmp_path, **JUMPS, metric=metric))
    assert result.model_folder.name.endswith(str(best["step"]))
    report = result.report.as_dict()
    assert report[f"validation_{metric}"] == best[f"validation_{metric}"]
    assert report["validation_loss"] == best["validation_loss"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("s"), **JUMPS, early_stopping_patience=2)
    return job, run_job(job)


def test_a_training_ends_when_no_evaluation_is_the_best(stopped, whole):
    job, result = stopped
    full, found = whole
    place = stop_of([point["validation_loss"] for point in found], 2)
    last = found[place]["step"]
    assert last < 24 and last % 5  # inside a window
    assert result.report.exit_reason == "early stopping"
    assert result.report.steps == result.history[-1].step == last
    assert evaluations(job) == found[: place + 1]
    behind = [entry for entry in curve(full) if entry[0] < last]
    assert curve(result)[:-1] == behind  # including the rates
    best = min(found[: place + 1], key=lambda point: point["validation_loss"])
    assert result.report.validation_loss == best["validation_loss"]
    assert full.report.exit_reason == "finished"


@pytest.mark.parametrize("moment", ["middle", "evaluation", "end"])
def test_a_resumed_training_stops_where_an_undisturbed_one_does(
    tmp_path, stopped, moment, monkeypatch
):
    undisturbed_job, undisturbed = stopped
    last = undisturbed.report.steps
    job = make_job(tmp_path, **JUMPS, early_stopping_patience=2)
    text = "step 5/24  loss" if moment == "middle" else f"step {last - 2}/24  valid"
    with pytest.raises(Crash), monkeypatch.context() as patch:
        if moment == "end":  # the checkpoint of the last step exists
            patch.setattr(loop, "finish", lambda *_: crash())
            run_job(job)
        with when_logged(text, crash):
            run_job(job)
    result = run_job(job)
    assert result.report.resumed_from_step
    assert result.report.exit_reason == "early stopping"
    assert curve(result) == curve(undisturbed)
    assert sorted(points(job)) == sorted(points(undisturbed_job))
    assert result.report.test_loss == undisturbed.report.test_loss
    assert result.model_folder.name == undisturbed.model_folder.name


def settings(task="sequence-classification", **train):
    return parse_settings(
        {"model": {"task": task, "config": {"model_type": "bert"}}, "train": train}
    )


@pytest.mark.parametrize(
    ("task", "metric", "said"),
    [
        ("sequence-classification", "f1-macro", "did you mean f1_macro?"),
        ("sequence-classification", "perplexity", "has no metric 'perplexity'"),
        ("regression", "pearsn", "regression has no metric 'pearsn'; did you mean pe"),
        ("causal-lm", "zzz", r"valid: \['accuracy', 'loss', 'perplexity'\]"),
    ],
)
def test_a_metric_that_the_task_has_not_is_refused(tmp_path, task, metric, said):
    with pytest.raises(SettingsError, match=said):
        check_options(settings(task, metric=metric))
    check_options(settings(task, metric="loss"))
    if task == "sequence-classification":
        with pytest.raises(SettingsError, match=said):
            run_job(make_job(tmp_path, metric=metric))


def test_patience_needs_evaluations():
    with pytest.raises(ValidationError, match="needs evaluations before the end"):
        TrainSettings(early_stopping_patience=2, evaluate_every=None)


def test_a_metric_without_a_value_stops_nothing_and_the_loss_chooses(tmp_path, caplog):
    """The AUC of rows of a single class is undefined, as in scikit-learn."""
    job = make_job(tmp_path, **JUMPS, metric="auc", early_stopping_patience=1)
    table = job.validation.table
    rows = TokenRows(table.filter(pc.equal(table["labels"], 1)))
    result = run_job(replace(job, validation=rows))
    found = [point["validation_loss"] for point in evaluations(job)]
    assert not any("validation_auc" in point for point in evaluations(job))
    assert len(found) == stop_of(found, 1) + 1
    assert result.report.validation_loss == min(found)
    [told] = [text for text in result.report.warnings if "train.metric: auc" in text]
    assert told in caplog.messages
