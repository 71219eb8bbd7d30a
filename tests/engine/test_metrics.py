"""Metrics of an evaluation compared with scikit-learn and SciPy, on one and two
ranks."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from flatout.engine.launch.launch import run_job
from flatout.engine.tasks import task_class, task_names
from flatout.engine.tasks._shared.metrics import Classes, Numbers
from flatout.engine.train.evaluate import Sums
from tests.engine.families import task_of
from tests.engine.runs import NO_DROPOUT, make_job, run_forked
from tests.forks import fork_two

CPU = torch.device("cpu")


def samples(classes: int, count: int = 300):
    """Return logits (N, C) with ties, and labels (N,). The last class is rare."""
    chance = np.random.default_rng(classes)
    labels = chance.integers(0, classes, count)
    labels[labels == classes - 1] = chance.integers(
        0, classes, (labels == classes - 1).sum()
    )
    logits = np.round(8 * chance.normal(size=(count, classes))) / 8
    logits[np.arange(count), labels] += 0.75
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def counted(found, *parts):
    for part in parts:
        found.update(*part)
    return found.compute()


def in_parts(logits, labels):
    """Yield parts like micro-batches, with padding that has no targets."""
    filler = torch.full((3,), -100 if labels.dtype == torch.int64 else math.nan)
    for some in torch.arange(len(labels)).split(77):
        padded = torch.cat([labels[some], filler.to(labels.dtype)])
        yield torch.cat([logits[some], torch.ones(3, logits.shape[1])]), padded


def by_scikit_learn(logits, labels):
    y, guess = labels.numpy(), logits.argmax(-1).numpy()
    scores = logits.softmax(-1).numpy()
    averaged = {"average": "macro", "zero_division": 0}
    found = {
        "accuracy": metrics.accuracy_score(y, guess),
        "f1_macro": metrics.f1_score(y, guess, **averaged),
        "f1_micro": metrics.f1_score(y, guess, average="micro"),
        "precision_macro": metrics.precision_score(y, guess, **averaged),
        "recall_macro": metrics.recall_score(y, guess, **averaged),
        "matthews": metrics.matthews_corrcoef(y, guess),
    }
    if scores.shape[1] == 2:
        return found | {"auc": metrics.roc_auc_score(y, scores[:, 1])}
    found["auc"] = metrics.roc_auc_score(y, scores, multi_class="ovr")
    if scores.shape[1] > 5:
        exact = {"k": 5, "labels": range(scores.shape[1])}
        found["top_5_accuracy"] = metrics.top_k_accuracy_score(y, scores, **exact)
    return found


@pytest.mark.parametrize("classes", [2, 3, 5, 9])
def test_figures_of_classes_equal_scikit_learns(classes):
    logits, labels = samples(classes)
    if classes == 9:  # no ties in a row, so that the fifth rank is unambiguous
        logits += torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))
    found = counted(Classes(classes, CPU), *in_parts(logits, labels))
    assert found == pytest.approx(by_scikit_learn(logits, labels), rel=1e-6)


def test_a_class_that_neither_occurs_nor_is_predicted_is_in_no_mean():
    logits, labels = samples(3)
    wide = torch.cat([logits, torch.full((len(logits), 1), -50.0)], 1)
    found = counted(Classes(4, CPU), (wide, labels))
    guess = logits.argmax(-1)
    assert found["f1_macro"] == pytest.approx(
        metrics.f1_score(labels, guess, average="macro")
    )
    assert found["auc"] == pytest.approx(
        metrics.roc_auc_score(labels, logits.softmax(-1), multi_class="ovr")
    )


def test_classes_that_occur_or_are_predicted_once_count_in_full():
    labels, guess = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2])
    logits = torch.nn.functional.one_hot(guess, 3).float()
    found = counted(Classes(3, CPU), (logits, labels))
    expected = by_scikit_learn(logits, labels)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_many_classes_are_counted_without_their_ranks():
    chance = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 20_000, (2_000,), generator=chance)
    logits = torch.rand(2_000, 20_000, generator=chance)
    logits[torch.arange(1_000), labels[:1_000]] += 1
    found = counted(Classes(20_000, CPU), (logits, labels))
    guess = logits.argmax(-1)
    assert "auc" not in found
    assert found["f1_macro"] == pytest.approx(
        metrics.f1_score(labels, guess, average="macro", zero_division=0)
    )
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(labels, guess))


def test_one_class_alone_has_no_area_and_no_correlation():
    logits, labels = torch.eye(3), torch.zeros(3, dtype=torch.int64)
    found = counted(Classes(3, CPU), (logits, labels))
    assert math.isnan(found["auc"]) and found["matthews"] == 0.0
    assert found["recall_macro"] == pytest.approx(1 / 9)


def test_figures_of_numbers_equal_scipys():
    chance = np.random.default_rng(3)
    labels = np.round(chance.normal(size=200), 1)
    guess = np.round(0.6 * labels + chance.normal(size=200), 1)
    pair = torch.tensor(guess, dtype=torch.float32)[:, None], torch.tensor(labels)
    found = counted(Numbers(), *in_parts(*pair))
    expected = {
        "mse": metrics.mean_squared_error(labels, guess),
        "mae": metrics.mean_absolute_error(labels, guess),
        "pearson": stats.pearsonr(labels, guess).statistic,
        "spearman": stats.spearmanr(labels, guess).statistic,
    }
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("found", [Classes(3, CPU), Numbers()])
def test_a_split_without_targets_has_no_figures(found):
    numbers = isinstance(found, Numbers)
    label = torch.full((2,), math.nan) if numbers else torch.full((2,), -100)
    found.update(torch.ones(2, 1 if numbers else 3), label)
    assert found.compute() == {}


@pytest.mark.parametrize("name", task_names())
def test_a_task_names_its_figures(name):
    assert task_class(name).figures["loss"] is False


def _figures_of_a_half(runtime, group, guess, labels):
    """Return the metrics of two ranks, each with every other row."""
    sums, own = Sums(task_of("regression"), CPU), slice(runtime.ranks.rank, None, 2)
    sums.add(guess[own], labels[own])
    expected = counted(Numbers(), (guess, labels))
    assert sums.read(runtime).metrics == pytest.approx(expected, rel=1e-12)


@pytest.mark.process
def test_numbers_of_two_ranks_have_the_figures_of_all():
    chance = torch.Generator().manual_seed(0)
    fork_two(
        _figures_of_a_half,
        torch.randn(31, 1, generator=chance),
        torch.randn(31, generator=chance),
    )


@pytest.mark.process
def test_two_ranks_find_the_figures_that_one_finds(tmp_path):
    same = {"config": NO_DROPOUT | {"initializer_range": 0.3}, "max_steps": 2}
    one = run_job(make_job(tmp_path / "one", **same)).report.as_dict()
    ranks = {"num_processes": 2}
    two = run_forked(make_job(tmp_path / "two", **same, distributed=ranks))
    figures = {name: v for name, v in one.items() if name.startswith("test_")}
    assert {"test_f1_macro", "test_auc", "test_matthews"} <= figures.keys()
    found = {name: two.report.as_dict()[name] for name in figures}
    assert found == pytest.approx(figures, rel=1e-4)
