"""Comparisons under noise: error rates in simulations, and equality with scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.sweep.best import WINNER, WORSE, SweepError, choose_best, compare
from flatout.engine.sweep.space import check_sweep, repeated
from flatout.engine.sweep.statistics import paired_difference, seeds_needed

RATE = "train.learning_rate"
MOST_FALSE, LEAST_HELD, COMPARISONS = 0.065, 0.93, 2_000


def simulated(seeds, settings=2, planted=0.0, step=0.0):
    """Return metrics (settings, 2,000, seeds): an effect that all settings share, plus
    noise."""
    draws = np.random.default_rng(0)
    common = draws.normal(0, 0.02, (1, COMPARISONS, seeds))
    figures = 0.9 + common + draws.normal(0, 0.01, (settings, COMPARISONS, seeds))
    figures[0] += planted
    return np.round(figures / step) * step if step else figures


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("step", [0.0, 0.001, 0.01])
def test_equal_settings_are_seldom_called_different(seeds, step):
    """This is also true if the metric is an accuracy on 1,000 or on 100 rows."""
    found = paired_difference(*simulated(seeds, step=step))
    assert found.is_distinct.mean() <= MOST_FALSE


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_interval_holds_a_planted_difference(seeds):
    found = paired_difference(*simulated(seeds, planted=0.015))
    held = (found.low <= 0.015) & (found.high >= 0.015)
    assert held.mean() >= LEAST_HELD
    assert (found.mean.mean() - 0.015) < 0.001


def test_the_best_of_several_equal_settings_is_seldom_a_winner():
    figures = simulated(5, settings=4)
    best = figures[figures.mean(-1).argmax(0), np.arange(COMPARISONS)]
    others = [paired_difference(best, one, comparisons=6) for one in figures]
    false = np.any([one.is_distinct for one in others], axis=0)
    assert false.mean() <= MOST_FALSE


def correlated_folds(planted=0.0, folds=5):
    """Return errors (2, 2,000, folds) of two estimators in 5-fold cross-validation on
    25 rows: the mean, and the mean of another half of the columns."""
    draws = np.random.default_rng(1)
    rows = draws.normal(size=(2, COMPARISONS, folds, 5))
    figures = np.empty((2, COMPARISONS, folds))
    for fold in range(folds):
        train = np.delete(rows, fold, axis=2).mean((2, 3))
        figures[..., fold] = ((rows[:, :, fold] - train[..., None]) ** 2).mean(-1)
    figures[0] += planted
    return figures


def test_folds_that_share_rows_are_compared_with_the_corrected_variance():
    found = paired_difference(*correlated_folds(), test_to_train=1 / 4)
    assert found.is_distinct.mean() <= MOST_FALSE
    found = paired_difference(*correlated_folds(planted=0.5), test_to_train=1 / 4)
    assert ((found.low <= 0.5) & (found.high >= 0.5)).mean() >= LEAST_HELD


def test_it_is_students_paired_interval():
    a, b = simulated(6)[:, 0]
    found = paired_difference(a, b)
    known = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))
    known = stats.ttest_rel(a, b).confidence_interval(1 - 0.05 / 3)
    found = paired_difference(a, b, comparisons=3)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))


def test_the_correction_is_that_of_nadeau_and_bengio():
    a, b = simulated(5)[:, 0]
    plain, corrected = (paired_difference(a, b, test_to_train=r) for r in (0, 0.25))
    ratio = (corrected.high - corrected.low) / (plain.high - plain.low)
    assert ratio == pytest.approx(math.sqrt((1 / 5 + 1 / 4) / (1 / 5)))


@pytest.mark.parametrize(
    ("a", "b", "distinct"),
    [
        ([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], False),  # no spread and no difference
        ([0.91, 0.91], [0.90, 0.90], False),  # one row more, twice
        ([1.0] * 5, [0.5] * 5, True),
    ],
)
def test_equal_differences_are_no_proof_by_themselves(a, b, distinct):
    assert bool(paired_difference(a, b).is_distinct) == distinct


def test_as_many_seeds_as_needed_show_the_difference_in_four_of_five():
    spread, planted = 0.01 * math.sqrt(2), 0.01
    seeds = seeds_needed(spread, planted)
    shown = paired_difference(*simulated(seeds, planted=planted)).is_distinct.mean()
    assert 0.75 <= shown <= 0.87
    assert seeds_needed(spread, planted, comparisons=6) > seeds
    assert seeds_needed(spread, 1e-9) is None


def rows_of(*settings):
    """Return the rows of a sweep. Each setting is given as a tuple of losses by
    seed."""
    return [
        {
            "trial_id": f"{number}{seed}",
            "train.learning_rate": 0.1 * number,
            "runtime.seed": seed,
            "validation_loss": loss,
            "validation_accuracy": None,
            "samples_per_s": 10.0 * number,
            "status": "ok" if loss is not None else "oom",
            "note": "",
        }
        for number, losses in enumerate(settings, 1)
        for seed, loss in enumerate(losses)
    ]


NOISY = (0.52, 0.61, 0.40, 0.55, 0.47)
CLEAR = (0.32, 0.42, 0.21, 0.34, 0.28)


def test_a_winner_is_crowned_only_if_the_interval_excludes_zero():
    best = choose_best(rows_of(NOISY, CLEAR), parse_settings({}))
    assert (best["is_winner"], best["settings"]) == (True, {RATE: 0.2})
    assert best["validation_loss"] == pytest.approx(np.mean(CLEAR))
    assert best["samples_per_s"] == 20.0
    winner, other = compare(rows_of(NOISY, CLEAR), parse_settings({}))
    assert (other["verdict"], winner["verdict"]) == (WORSE, WINNER)
    known = stats.ttest_rel(NOISY, CLEAR).confidence_interval(0.95)
    assert (other["low"], other["high"]) == pytest.approx((known.low, known.high))
    assert other["standard_deviation"] == pytest.approx(np.std(NOISY, ddof=1))
    assert other["difference"] == pytest.approx(np.mean(NOISY) - np.mean(CLEAR))


def test_without_a_winner_the_table_has_the_seeds_that_are_needed(caplog):
    caplog.set_level("INFO")
    near = [loss - 0.01 * number for number, loss in enumerate(NOISY)]
    near[0] += 0.03
    best = choose_best(rows_of(NOISY, near), parse_settings({}))
    assert not best["is_winner"]
    second, first = compare(rows_of(NOISY, near), parse_settings({}))
    assert second["verdict"] == "best mean, no winner"
    differences = np.array(NOISY) - near
    needed = seeds_needed(differences.std(ddof=1), differences.mean())
    assert first["verdict"] == (
        f"not distinguishable; {needed - 5} more seeds would be needed for a "
        f"difference of {differences.mean():.3g}"
    )
    assert first["verdict"] in caplog.text


def test_a_setting_that_failed_under_a_seed_is_not_the_best():
    failed = (0.1, None, 0.1, 0.1, 0.1)
    best = choose_best(rows_of(NOISY, failed), parse_settings({}))
    assert best["settings"] == {RATE: 0.1}
    found = compare(rows_of(NOISY, failed), parse_settings({}))
    assert [row["trainings"] for row in found] == [5, 4]
    with pytest.raises(SweepError, match="no trial of the sweep \\(2\\)"):
        compare([{**r, "log": ""} for r in rows_of((None, None))], parse_settings({}))


def test_one_training_each_is_no_comparison():
    best = choose_best(rows_of((0.5,), (0.4,)), parse_settings({}))
    assert not best["is_winner"]
    assert best["settings"] == {RATE: 0.2}
    found = compare(rows_of((0.5,), (0.4,)), parse_settings({}))
    assert "set sweep.seeds" in found[1]["verdict"]


def test_folds_are_compared_with_the_corrected_variance():
    rows = [
        {**row, "test_loss": row["validation_loss"]} for row in rows_of(NOISY, CLEAR)
    ]
    rows = [{**row, "fold": row.pop("runtime.seed") + 1} for row in rows]
    winner, other = compare(rows, parse_settings({}))
    found = paired_difference(NOISY, CLEAR, test_to_train=0.25)
    assert (other["low"], other["high"]) == pytest.approx((found.low, found.high))
    assert winner["test_loss"] == pytest.approx(np.mean(CLEAR))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 1}, "sweep.seeds: should be greater than or equal to 2"),
        ({"seeds": 3, "sampler": "tpe"}, "sweep.seeds and split.folds compare whole"),
        ({"seeds": 3, "pruner": "median"}, "sweep.seeds and split.folds compare whole"),
    ],
)
def test_seeds_that_compare_nothing_are_refused(given, message):
    with pytest.raises(SettingsError) as refused:
        check_sweep(parse_settings({"sweep": given}))
    assert message in str(refused.value)


def test_the_grid_is_trained_with_every_seed_or_fold():
    asked = parse_settings({"runtime": {"seed": 7}, "sweep": {"seeds": 2}})
    assert repeated(asked).sweep.grid == {**asked.sweep.grid, "runtime.seed": [7, 8]}
    plain = parse_settings({})
    assert repeated(plain).sweep.grid == plain.sweep.grid
    assert repeated(plain, 3).sweep.grid == {"fold": [1, 2, 3]}
    own = parse_settings({"sweep": {"grid": {RATE: [0.1]}}})
    assert repeated(own, 2).sweep.grid == {RATE: [0.1], "fold": [1, 2]}
    with pytest.raises(SettingsError, match="one of the two"):
        repeated(asked, 2)
