"""Contenders of modes peers and headline train the same, whatever rows are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatout.engine.benchmark.peers import flags
from flatout.engine.benchmark.peers.contender import train_with_flatout
from flatout.engine.benchmark.peers.flattened import FLATTENED
from flatout.engine.benchmark.peers.samples import SampleCollator
from flatout.engine.benchmark.peers.trainer import train_with_trainer
from flatout.engine.machine.runtime import set_up
from flatout.engine.tasks import TaskError
from tests.engine import test_arrays, test_images
from tests.engine.plain import job_for, save_start

KINDS = ("text", "log keys", "pieces", "images", "numbers")
TASKS = {
    "text": "sequence-classification",
    "log keys": "next-key",
    "pieces": "causal-lm",
}


def job_of(kind, folder):
    """Steps over all rows at once, so that their order decides nothing."""
    if kind == "images":
        job = test_images.job_of(folder, flip=0.0)
    elif kind == "numbers":
        job = test_arrays.job_of(folder)
    else:
        task = TASKS[kind]
        job = job_for(folder, task, save_start(folder / "start", task))
    given = {"global_batch_size": len(job.train), "epochs": 6, "max_steps": None}
    # The Trainer warms up from a rate of 0.
    given |= {"learning_rate": 1e-2, "warmup_fraction": 0.0}
    train = job.settings.train.model_copy(update={**given, "token_budget": "auto"})
    return replace(job, settings=job.settings.model_copy(update={"train": train}))


TIMING = {"evaluations": 2, "warmup_steps": 2}


def losses(figures):
    return [point["validation_loss"] for point in figures["curve"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_learns_what_flatout_learns(kind, tmp_path):
    job = job_of(kind, tmp_path)
    own = train_with_flatout(job, set_up(job.settings.runtime), TIMING)
    runtime = set_up(job.settings.runtime)  # the same first weights
    found = train_with_trainer(job, runtime, "trainer-best", tmp_path, TIMING)
    assert (own["steps"], found["steps"]) == (6, 6)
    assert own["samples"] == found["samples"] == 6 * len(job.train)
    ours = losses(own)
    assert losses(found) == pytest.approx(ours, rel=1e-4)
    assert ours[0] != pytest.approx(ours[1], rel=5e-4)
    attends = kind in ("text", "pieces", "images")
    assert found["attention"] == ("sdpa" if attends else "none")


@pytest.mark.parametrize("name", ["trainer-unsorted", "trainer-flattened"])
def test_contenders_of_one_optimisation_learn_the_same(name, tmp_path):
    """All rows at once: neither their order nor padding decides anything."""
    job = job_of("pieces", tmp_path)
    best, other = (
        train_with_trainer(job, set_up(job.settings.runtime), n, tmp_path, TIMING)
        for n in ("trainer-best", name)
    )
    assert other["samples"] == best["samples"]
    assert losses(other) == pytest.approx(losses(best), rel=1e-4)
    flat = name == "trainer-flattened"
    assert other["attention"] == (FLATTENED if flat else "sdpa")
    assert other["strategy"] == "random"
    collator = "DataCollatorWithFlattening" if flat else None
    assert other["flags"].get("data_collator") == collator


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "refused by transformers: DataCollatorWithFlattening"),
        ("log keys", "no padding-free attention for log_key_lstm"),
        ("numbers", "no padding-free attention for residual_mlp"),
    ],
)
def test_what_cannot_be_flattened_is_refused_and_says_by_whom(kind, reason, tmp_path):
    job = job_of(kind, tmp_path)
    runtime = set_up(job.settings.runtime)
    with pytest.raises(TaskError, match=reason):
        train_with_trainer(job, runtime, "trainer-flattened", tmp_path, TIMING)


def test_without_ligers_package_its_contender_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(flags, "find_spec", lambda name: None)
    job = job_of("pieces", tmp_path)
    with pytest.raises(TaskError, match="pip install liger-kernel"):
        flags.flags_of("trainer-liger", job, set_up(job.settings.runtime))


def test_its_crops_are_drawn_anew(tmp_path):
    collate = SampleCollator(test_images.job_of(tmp_path, crop_area=0.5))
    first, second = collate([3, 5]), collate([3, 5])
    assert torch.equal(first["inputs"], second["inputs"])
    assert not torch.equal(first["crops"], second["crops"])
