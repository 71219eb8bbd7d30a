"""Calibration: measure how well probabilities match outcomes, and correct them.

Logits (N, L) with 0/1 labels (N, L) are for L independent labels, each with a sigmoid.
Logits (N, C) with labels (N,) are for C classes with a softmax. All computations use
fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, softmax

NUM_BINS = 15
"""The number of bins of equal width into which probabilities are divided."""
MOST_SCALED = 100.0
"""The largest temperature that is tried. The smallest one is its inverse."""
NARROWEST = 1e-12
"""The smallest distance of a threshold from 0 or 1."""
Floats = npt.NDArray[np.float64]
Outcomes = tuple[Floats, npt.NDArray[np.bool_]]
"""Probabilities (N, L), and booleans (N, L) that are true for labels that apply."""


def outcomes(logits: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Outcomes:
    """Return the probabilities of N rows, and whether the predicted event occurred. For
    two classes, the event is the second class. For more classes, it is the predicted
    class. For independent labels, there is one event per label."""
    logits = logits.astype(np.float64)
    if labels.ndim == 2:
        return expit(logits), labels == 1
    if logits.shape[1] == 2:
        return expit(logits[:, 1:] - logits[:, :1]), labels[:, None] == 1
    shares = softmax(logits, axis=1)
    return shares.max(1, keepdims=True), (shares.argmax(1) == labels)[:, None]


def bins_of(shares: Floats, hits: npt.NDArray[np.bool_]) -> Floats:
    """Divide N rows into bins by their probabilities `shares` (N,). Return an array
    (NUM_BINS, 3) with the number of rows, the sum of their probabilities and the number
    of true `hits` (N,) in each bin."""
    place = np.searchsorted(np.linspace(0, 1, NUM_BINS + 1)[1:-1], shares, "right")
    weights = (None, shares, hits)
    sums = [np.bincount(place, weight, NUM_BINS) for weight in weights]
    return np.stack(sums, 1).astype(np.float64)


def calibration_errors(shares: Floats, hits: npt.NDArray[np.bool_]) -> list[float]:
    """Return the expected calibration error (Naeini et al. 2015) of each column of
    `shares` and `hits` (N, L)."""
    found = [bins_of(*label) for label in zip(shares.T, hits.T, strict=True)]
    return [float(np.abs(b[:, 1] - b[:, 2]).sum() / max(1, len(hits))) for b in found]


def calibration_figures(
    logits: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    temperature: float,
    names: Sequence[str],
) -> dict[str, Any]:
    """Return the calibration error, with and without division of the logits by
    `temperature`, as means over labels. If there is one error for each of `names`,
    these errors are also included. `reliability` lists the number of rows, the mean
    probability and the fraction of hits in each non-empty bin, over all labels."""
    figures: dict[str, Any] = {"reliability": {}}
    for suffix, divisor in (("_uncalibrated", 1.0), ("", temperature)):
        shares, hits = outcomes(logits / divisor, labels)
        errors = calibration_errors(shares, hits)
        figures[f"calibration_error{suffix}"] = sum(errors) / len(errors)
        if len(errors) == len(names):
            figures[f"calibration_errors{suffix}"] = dict(
                zip(names, errors, strict=True)
            )
        lines = [
            [int(rows), total / rows, true / rows]
            for rows, total, true in bins_of(shares.ravel(), hits.ravel()).tolist()
            if rows
        ]
        figures["reliability"][f"T = {divisor:.3g}"] = lines
    return figures | {"temperature": temperature}


def fitted_temperature(logits: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Return the temperature that minimises the negative log-likelihood of the labels
    when logits are divided by it (Guo et al. 2017). The log-likelihood is concave in
    the inverse temperature, so the minimum is the only root of its slope."""
    logits = logits.astype(np.float64)
    independent = labels.ndim == 2
    # Gaps to the right outcome: if every row is right, no term is positive, so rounding
    # cannot change the sign of the slope.
    if independent:
        gaps = np.where(labels == 1, -logits, logits)
    else:
        gaps = logits - np.take_along_axis(logits, labels[:, None], axis=1)

    def slope(inverse: float) -> float:
        scaled = gaps * inverse
        shares = expit(scaled) if independent else softmax(scaled, axis=1)
        return float((gaps * shares).sum())

    if slope(1 / MOST_SCALED) >= 0:
        return MOST_SCALED
    if slope(MOST_SCALED) <= 0:
        return 1 / MOST_SCALED
    return float(1 / brentq(slope, 1 / MOST_SCALED, MOST_SCALED, xtol=1e-12))


def best_threshold(shares: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the threshold with the largest F1 for the probabilities `shares` (N,), or
    None if no row is `positive` (N,). Candidates lie halfway between neighbouring
    probabilities. Of several best thresholds, the one nearest to 0.5 is returned."""
    if not positive.any():
        return None
    values, groups = np.unique(shares, return_inverse=True)
    cuts = (np.concatenate([[0.0], values[:-1]]) + values) / 2
    counts = np.bincount(groups), np.bincount(groups, positive)
    given, right = (count[::-1].cumsum()[::-1] for count in counts)
    f1 = 2 * right / (given + positive.sum())
    best = cuts[f1 == f1.max()]
    chosen = best[np.abs(best - 0.5).argmin()]
    return float(np.clip(chosen, NARROWEST, 1 - NARROWEST))
