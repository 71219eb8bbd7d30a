"""Class weights, label smoothing and focal loss, compared with PyTorch's own."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from flatout.engine.launch.launch import run_job
from flatout.engine.models.model import TaskModel
from flatout.engine.ops.attention import PACKED
from flatout.engine.parameters import SettingsError, TrainSettings, parse_settings
from flatout.engine.tasks import LossOptions, check_options, loss_options
from flatout.engine.train.optimizer import Updater, build_optimizer
from flatout.engine.train.step import Stepper
from tests.engine.families import LABEL_NAMES, MAX_LENGTH, built, step_rows, task_of
from tests.engine.runs import CPU, NO_DROPOUT, make_job, run_forked

WEIGHTS = (0.5, 3.0, 1.25)
OPTIONS = [
    LossOptions(WEIGHTS),
    LossOptions(None, 0.2),
    LossOptions(WEIGHTS, 0.2),
    LossOptions(None, 0.0, 2.0),
    LossOptions(WEIGHTS, 0.0, 0.5),
]
CUTS = [
    ("fixed", 4096),
    ("random", 60),
    ("grouped", 60),
    ("packed", 4096),
    ("packed", 60),
]
TASKS = {
    "sequence-classification": "bert",
    "token-classification": "bert",
    "causal-lm": "qwen3",
}


def plain_loss(logits, labels, options):
    """Return PyTorch's weighted mean, or the focal loss as defined in its paper."""
    weight = options.class_weights and torch.tensor(options.class_weights)
    smooth = {"label_smoothing": options.label_smoothing}
    if not options.focal_gamma:
        return nn.CrossEntropyLoss(weight=weight, **smooth)(logits, labels)
    share = logits.softmax(-1)[torch.arange(len(labels)), labels]
    weights = torch.ones(len(labels)) if weight is None else weight[labels]
    losses = -weights * (1 - share) ** options.focal_gamma * share.log()
    return losses.sum() / weights.sum()


def plain_gradient(task, rows, options):
    """Return the gradient of the first global batch, padded in a transformers model."""
    model = built(TASKS[task], task)
    (batch,) = step_rows(TASKS[task], task, "random", rows=rows)[0].micro_batches
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(ids, attention_mask=mask).logits
    labels = batch["labels"]
    if task == "causal-lm":
        seen = mask[:, 1:]
        logits, labels = logits[:, :-1][seen], ids[:, 1:][seen]
    if task == "token-classification":  # the choice of targets is tested elsewhere
        logits, labels = logits.flatten(0, 1)[batch["target_index"]], labels[:, 0]
    loss = plain_loss(logits, labels, options)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@cache
def model_for(task, implementation):
    model = built(TASKS[task], task, implementation)
    return TaskModel(model, task_of(task), MAX_LENGTH)


def found_gradient(task, options, strategy, budget, world_size):
    """Return the sum of the gradients that the ranks' steppers compute."""
    family, total, grads = TASKS[task], 0.0, {}
    for rank in range(world_size):
        cut = {"token_budget": budget, "world_size": world_size, "rank": rank}
        data = step_rows(family, task, strategy, **cut)
        data.collator.task.loss_options = options
        ours = model_for(task, PACKED if strategy == "packed" else "sdpa")
        ours.task = data.collator.task
        ours.zero_grad()
        optimizer = build_optimizer(
            ours, TrainSettings(), fused=False, capturable=False
        )
        run = Stepper(ours, Updater(optimizer, None, fused=False), CPU)
        run.set_scalars(data[0])
        run.backward(data[0])
        total += run._loss.item()
        for name, parameter in ours.model.named_parameters():
            grads[name] = grads.get(name, 0) + parameter.grad
    return total, grads


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_pytorchs_under_every_batching_budget_and_world_size(
    task, options
):
    if task == "causal-lm" and options.class_weights:
        pytest.skip("pieces of text have no weights")
    loss, expected = plain_gradient(task, None, options)
    for (strategy, budget), world_size in product(CUTS, (1, 2)):
        found = found_gradient(task, options, strategy, budget, world_size)
        assert found[0] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[1], expected, rtol=1e-3, atol=1e-6)


def test_two_ranks_train_as_one_does_and_evaluations_go_without(tmp_path):
    options = {"class_weights": "balanced", "label_smoothing": 0.1, "focal_gamma": 2.0}
    same = {"config": NO_DROPOUT, **options}
    one = run_job(make_job(tmp_path / "one", **same))
    ranks = {"num_processes": 2}
    two = run_forked(make_job(tmp_path / "two", **same, distributed=ranks))
    losses = [[point.loss for point in result.history] for result in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    chance = (2 / 3) ** 2 * torch.tensor(3.0).log().item()
    assert one.report.chance_loss == pytest.approx(chance)
    assert one.report.initial_loss == pytest.approx(chance, rel=0.1)
    assert one.report.validation_loss == pytest.approx(1.0986, rel=0.1)


def test_balanced_weights_are_scikit_learns():
    labels = np.repeat([0, 1, 2], [7, 2, 4])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    train = TrainSettings(class_weights="balanced")
    found = loss_options(train, LABEL_NAMES, {"0": 7, "1": 2, "2": 4})
    assert found.class_weights == pytest.approx(expected)


def test_weights_go_by_name_or_by_place():
    by_name = TrainSettings(class_weights={"c": 2, "a": 0.5})
    assert loss_options(by_name, LABEL_NAMES, {}).class_weights == (0.5, 1.0, 2.0)
    numbered = TrainSettings.model_validate({"class_weights": {1: 2.0}})
    assert loss_options(numbered, ["0", "1"], {}).class_weights == (1.0, 2.0)
    by_place = TrainSettings(class_weights=[1, 2, 3])
    assert loss_options(by_place, LABEL_NAMES, {}).class_weights == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"aa": 1.0}, "no class is called 'aa'; did you mean a?"),
        ([1.0, 2.0], r"has 2 weights for 3 classes: one each, in the order \['a', "),
        ("balanced", r"every class; 2 of 3 have no row \('b', 'c'\): give one"),
        (dict.fromkeys("abc", 0.0), "all weights are 0, so the model would learn noth"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, said):
    with pytest.raises(SettingsError, match=said):
        loss_options(TrainSettings(class_weights=weights), LABEL_NAMES, {"0": 3})


def test_balanced_weights_need_rows_of_one_class_each():
    with pytest.raises(SettingsError, match="balanced needs one class per row; give"):
        loss_options(TrainSettings(class_weights="balanced"), LABEL_NAMES, {})


@pytest.mark.parametrize(
    ("task", "option", "valid"),
    [
        ("regression", {"label_smoothing": 0.1}, "none"),
        ("causal-lm", {"class_weights": "balanced"}, "focal_gamma, label_smoothing"),
    ],
)
def test_options_that_a_task_does_not_take_are_refused(task, option, valid):
    settings = parse_settings(
        {"model": {"task": task, "config": {"model_type": "bert"}}, "train": option}
    )
    said = f"train.{next(iter(option))}: {task} does not use it \\(valid: {valid}\\)"
    with pytest.raises(SettingsError, match=said):
        check_options(settings)


@pytest.mark.parametrize("options", [LossOptions(), *OPTIONS[1:2]])
def test_a_fused_kernel_computes_no_loss_with_options(options):
    task = step_rows("qwen3", "causal-lm", "packed").collator.task
    task.loss_options = options
    assert task.is_plain == (options == LossOptions())
