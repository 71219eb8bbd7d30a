"""Paired comparisons of metrics that vary from run to run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit  # importing scipy.stats takes a second

ERROR_RATE, POWER = 0.05, 0.8
"""The probability of reporting a difference between equal settings, and that of
detecting a true difference with enough seeds."""
MAX_SEEDS = 1_000


class Difference(NamedTuple):
    """The mean of paired differences, its confidence interval, and their standard
    deviation (`spread`), as numbers or arrays (...) for several comparisons."""

    mean: Any
    low: Any
    high: Any
    spread: Any

    @property
    def is_distinct(self) -> Any:
        """Return whether the interval excludes zero."""
        return (self.low > 0) | (self.high < 0)


def paired_difference(
    a: Any, b: Any, comparisons: int = 1, test_to_train: float = 0.0
) -> Difference:
    """Compare the metrics `a` and `b` (..., N) of two settings that were trained with
    the same N >= 2 seeds or folds, and return the difference `a` - `b`. The 95 %
    confidence interval is based on Student's t-distribution, with a Bonferroni
    correction for `comparisons`. `test_to_train`, the ratio of test to training rows of
    a fold, or 0 for seeds, corrects the variance, because folds share training rows
    (Nadeau and Bengio 2003)."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    differences, count = a - b, a.shape[-1]
    mean = differences.mean(-1)
    # With few rows, an accuracy has only a few possible values, so equal differences do
    # not mean that the true spread is 0. The spread is therefore at least that of the
    # rounding error.
    gaps = np.diff(np.sort(np.concatenate([a, b], -1), -1), axis=-1)
    step = np.where(gaps > 0, gaps, np.inf).min(-1)
    rounding = np.where(np.isfinite(step), step, 0) / math.sqrt(6)
    spread = np.maximum(differences.std(-1, ddof=1), rounding)
    error = spread * math.sqrt(1 / count + test_to_train)
    half = stdtrit(count - 1, 1 - ERROR_RATE / (2 * comparisons)) * error
    return Difference(mean, mean - half, mean + half, spread)


def seeds_needed(spread: float, difference: float, comparisons: int = 1) -> int | None:
    """Return how many seeds are needed to detect a true `difference` > 0 in 80 % of
    comparisons, or None if more than 1,000 are needed. `spread` is the standard
    deviation of the paired differences."""
    counts, error_rate = np.arange(2, MAX_SEEDS + 1), ERROR_RATE / (2 * comparisons)
    quantiles = stdtrit(counts - 1, 1 - error_rate) + stdtrit(counts - 1, POWER)
    enough = counts[quantiles * spread / np.sqrt(counts) <= difference]
    return int(enough[0]) if len(enough) else None
