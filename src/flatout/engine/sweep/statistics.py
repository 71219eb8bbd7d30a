"""Paired comparisons of figures that differ from training to training."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit  # importing scipy.stats needs a second

ERROR_RATE, POWER = 0.05, 0.8
"""Share of comparisons of equal settings that may be called different, and share of
those that show a difference if the seeds suffice."""
MAX_SEEDS = 1_000


class Difference(NamedTuple):
    """Mean of paired differences, its interval and their standard deviation: numbers,
    or arrays (...) of several comparisons at once."""

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
    """Return `a` - `b`, the figures (..., N) of two settings under the same N >= 2
    seeds or folds.

    The interval is Student's, by Bonferroni at 95 % for all `comparisons` together.
    Folds share train rows: `test_to_train`, test rows by train rows of a fold, corrects
    the variance for that (Nadeau and Bengio 2003); it is 0 for seeds.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    differences, count = a - b, a.shape[-1]
    mean = differences.mean(-1)
    # An accuracy on few rows has few values: equal differences do not show that the
    # spread is 0. Rounding alone gives them this standard deviation.
    gaps = np.diff(np.sort(np.concatenate([a, b], -1), -1), axis=-1)
    step = np.where(gaps > 0, gaps, np.inf).min(-1)
    rounding = np.where(np.isfinite(step), step, 0) / math.sqrt(6)
    spread = np.maximum(differences.std(-1, ddof=1), rounding)
    half = stdtrit(count - 1, 1 - ERROR_RATE / (2 * comparisons)) * spread
    half = half * math.sqrt(1 / count + test_to_train)
    return Difference(mean, mean - half, mean + half, spread)


def seeds_needed(spread: float, difference: float, comparisons: int = 1) -> int | None:
    """Return the number of seeds that show a true `difference`, above 0, in 80 % of
    comparisons; None for more than 1,000."""
    counts = np.arange(2, MAX_SEEDS + 1)
    quantiles = stdtrit(counts - 1, 1 - ERROR_RATE / (2 * comparisons))
    quantiles = quantiles + stdtrit(counts - 1, POWER)
    enough = counts[quantiles * spread / np.sqrt(counts) <= difference]
    return int(enough[0]) if len(enough) else None
