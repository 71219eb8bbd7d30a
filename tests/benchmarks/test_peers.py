"""The Hugging Face Trainer beside flatout: same model, rows, judge, steps."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from flatout.engine.benchmark.peers.contender import contend as train_contender
from flatout.engine.benchmark.peers.flags import flags_of
from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.machine.runtime import set_up
from flatout.engine.tasks import TaskError
from tests.engine.benches import job_files, settings, spec

TRAINER_DEFAULTS_KEPT = {"optim", "bf16", "dataloader_num_workers"}


@pytest.fixture
def job(tmp_path):
    changed = with_changes(settings(), {"train.max_steps": 6})
    return job_files(tmp_path).open(changed, tmp_path)


def contend(job, name, folder):
    asked = replace(spec("peer", contender=name), settings=job.settings)
    return train_contender(asked, job, folder)


def test_contenders_train_the_same_steps_to_nearly_the_same_loss(job, tmp_path):
    found = {
        name: contend(job, name, tmp_path)
        for name in ("flatout", "trainer-default", "trainer-best", "trainer-unsorted")
    }
    for figures in found.values():
        assert (figures["steps"], figures["samples"]) == (6, 48)
        assert [point["step"] for point in figures["curve"]] == [1, 2, 3, 4, 5, 6]
        assert figures["samples_per_s"] > 0
        seconds = [point["seconds"] for point in figures["curve"]]
        assert seconds == sorted(seconds)
        assert 0 < figures["first_step_s"] == seconds[0]
    losses = [figures["validation_loss"] for figures in found.values()]
    assert max(losses) - min(losses) < 0.05
    best, unsorted = (found[f"trainer-{n}"]["flags"] for n in ("best", "unsorted"))
    assert best == {**unsorted, "train_sampling_strategy": "group_by_length"}


def test_tags_of_words_are_compared_with_the_trainer_too(tmp_path):
    changes = {"train.max_steps": 6, "model.task": "token-classification"}
    changed = with_changes(settings(), changes)
    tags = job_files(tmp_path, task="token-classification").open(changed, tmp_path)
    found = [contend(tags, name, tmp_path) for name in ("flatout", "trainer-best")]
    assert {figures["samples"] for figures in found} == {48}
    losses = [figures["validation_loss"] for figures in found]
    assert max(losses) - min(losses) < 0.05


def test_a_training_shorter_than_its_warm_up_has_a_rate(job, tmp_path):
    timing = {"warmup_steps": 10, "window_steps": 2, "evaluations": 0}
    asked = replace(spec("peer", contender="flatout", **timing), settings=job.settings)
    figures = train_contender(asked, job, tmp_path)
    assert figures["curve"] == []
    assert len(figures["window_samples_per_s"]) == 1
    rate = figures["samples"] / figures["train_s"]
    assert figures["samples_per_s"] == pytest.approx(rate)


@pytest.mark.parametrize("name", ["flatout", "trainer-best"])
def test_the_rate_is_the_median_of_windows_behind_the_warm_up(job, tmp_path, name):
    asked = spec("peer", contender=name, warmup_steps=2, window_steps=1, evaluations=1)
    asked = replace(asked, settings=job.settings)
    figures = train_contender(asked, job, tmp_path)
    assert [point["step"] for point in figures["curve"]] == [6]
    rates = figures["window_samples_per_s"]
    assert len(rates) == 4, "steps 3 to 6"
    assert figures["samples_per_s"] == sorted(rates)[1]
    spread = 100 * (max(rates) - min(rates)) / median(rates)
    assert figures["samples_per_s_spread_pct"] == pytest.approx(spread)
    assert figures["total_ms"] == pytest.approx(1000 * 8 / sorted(rates)[1])


@pytest.mark.parametrize("name", ["flatout", "trainer-best"])
def test_a_contender_trains_no_longer_than_it_has_windows_to_take(job, tmp_path, name):
    asked = spec(
        "peer", contender=name, warmup_steps=2, window_steps=1, evaluations=0, repeats=1
    )
    asked = replace(asked, settings=job.settings)
    figures = train_contender(asked, job, tmp_path)
    assert (figures["steps"], len(figures["window_samples_per_s"])) == (3, 1)


def test_default_flags_change_nothing_but_the_optimisation(job):
    flags = flags_of("trainer-default", job, set_up(job.settings.runtime))
    assert not TRAINER_DEFAULTS_KEPT & set(flags)
    assert flags["per_device_train_batch_size"] == 8
    assert flags["max_steps"] == 6


def test_a_task_that_cannot_be_compared_is_refused(job, tmp_path):
    masked = with_changes(job.settings, {"model.task": "masked-lm"})
    with pytest.raises(TaskError, match="peers does not support masked-lm"):
        contend(replace(job, settings=masked), "trainer-best", tmp_path)
