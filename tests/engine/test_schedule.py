"""Learning rates compared with exact values and with transformers."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from flatout.engine.parameters import TrainSettings
from flatout.engine.train.optimizer import learning_rate


def rates(steps, **settings):
    train = TrainSettings(learning_rate=1.0, **settings)
    return [learning_rate(train, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"schedule": "constant"}, [0.5, *[1] * 9]),
        (
            {"schedule": "wsd", "decay_fraction": 0.4},
            [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        (
            {"min_learning_rate_share": 0.2},
            [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
        ),
    ],
)
def test_rates_are_exact(settings, expected):
    assert rates(10, warmup_fraction=0.2, **settings) == pytest.approx(expected)


def test_a_part_of_a_step_of_warm_up_is_a_whole_one():
    """0.25 of 10 steps are 2.5, which `TrainingArguments.get_warmup_steps` rounds to
    3."""
    found = rates(10, warmup_fraction=0.25, schedule="constant")
    assert found == pytest.approx([1 / 3, 2 / 3, *[1] * 8])


@pytest.mark.parametrize(
    ("batch", "meant", "rate"), [(64, 16, 2.0), (16, 64, 0.5), (64, None, 1.0)]
)
def test_the_peak_follows_the_square_root_of_the_batch_where_asked(batch, meant, rate):
    found = rates(
        10,
        global_batch_size=batch,
        learning_rate_at_batch=meant,
        warmup_fraction=0.2,
        schedule="constant",
    )
    assert found == pytest.approx([rate / 2, *[rate] * 9])


@pytest.mark.parametrize(
    ("settings", "name", "own"),
    [
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        (
            {"schedule": "cosine", "min_learning_rate_share": 0.1},
            "cosine_with_min_lr",
            {"min_lr_rate": 0.1},
        ),
        (
            {
                "schedule": "wsd",
                "decay_fraction": 0.3,
                "min_learning_rate_share": 0.1,
            },
            "warmup_stable_decay",
            {"num_decay_steps": 12, "min_lr_ratio": 0.1, "decay_type": "linear"},
        ),
    ],
)
def test_rates_behind_the_warm_up_are_those_of_transformers(settings, name, own):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=4,
        num_training_steps=40,
        scheduler_specific_kwargs=own,
    )
    expected = []
    for _ in range(40):
        expected += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    found = rates(40, warmup_fraction=0.1, **settings)
    assert found[4:] == pytest.approx(expected[4:])
    # Their first step has a learning rate of zero.
    assert found[:3] == pytest.approx([0.25, 0.5, 0.75])


def test_a_decay_that_begins_in_the_warm_up_is_refused():
    with pytest.raises(ValidationError, match="add up to more than 1"):
        TrainSettings(schedule="wsd", warmup_fraction=0.3, decay_fraction=0.8)
