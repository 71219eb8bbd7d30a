"""Contenders of modes peers and headline train the same, whatever rows are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatout.engine.benchmark.peers.contender import train_with_flatout
from flatout.engine.benchmark.peers.samples import SampleCollator
from flatout.engine.benchmark.peers.trainer import train_with_trainer
from flatout.engine.machine.runtime import set_up
from tests.engine import test_arrays, test_images
from tests.engine.plain import job_for, save_start

KINDS = ("text", "log keys", "images", "numbers")


def job_of(kind, folder):
    """Steps over all rows at once, so that their order decides nothing."""
    if kind == "images":
        job = test_images.job_of(folder, flip=0.0)
    elif kind == "numbers":
        job = test_arrays.job_of(folder)
    else:
        task = {"text": "sequence-classification", "log keys": "next-key"}[kind]
        job = job_for(folder, task, save_start(folder / "start", task))
    given = {"global_batch_size": len(job.train), "epochs": 6, "max_steps": None}
    # The Trainer warms up from a rate of 0.
    given |= {"learning_rate": 1e-2, "warmup_fraction": 0.0}
    train = job.settings.train.model_copy(update={**given, "token_budget": "auto"})
    return replace(job, settings=job.settings.model_copy(update={"train": train}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_learns_what_flatout_learns(kind, tmp_path):
    job, timing = job_of(kind, tmp_path), {"evaluations": 2, "warmup_steps": 2}
    own = train_with_flatout(job, set_up(job.settings.runtime), timing)
    runtime = set_up(job.settings.runtime)  # the same first weights
    found = train_with_trainer(job, runtime, "trainer-best", tmp_path, timing)
    assert (own["steps"], found["steps"]) == (6, 6)
    assert own["samples"] == found["samples"] == 6 * len(job.train)
    ours, theirs = (
        [point["validation_loss"] for point in figures["curve"]]
        for figures in (own, found)
    )
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert ours[0] != pytest.approx(ours[1], rel=5e-4)
    assert found["attention"] == ("sdpa" if kind in ("text", "images") else "none")


def test_its_crops_are_drawn_anew(tmp_path):
    collate = SampleCollator(test_images.job_of(tmp_path, crop_area=0.5))
    first, second = collate([3, 5]), collate([3, 5])
    assert torch.equal(first["inputs"], second["inputs"])
    assert not torch.equal(first["crops"], second["crops"])
