"""What rate a training with the recommended settings will have, and how surely.

A training is one more process, later: what it comes to differs from a trial's mean as
trials differ from each other, and by how far the machine drifts until then. Windows
inside of a trial say little of either. So the interval is a prediction for one more
trial (Student's t; Hahn & Meeker 1991, section 4.7), wider by the mean square of the
steps from each trial to the next (von Neumann 1941). A tune has two to four trials of
the same settings, too few for a variance: it is shrunk to a usual one, as by an inverse
gamma prior of USUAL_DEGREES.

Windows of the configured settings speak for the recommended ones too, times the ratio
that was measured by turns: so all minutes of a tune are in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

CONFIDENCE = 0.9
USUAL_ON_CPU, USUAL_ON_GPU = 0.02, 0.01
"""Standard deviation of processes that train the same on a quiet machine: a share."""
USUAL_DEGREES = 4
"""How many trials the usual deviation counts as."""
LEAST_WINDOWS = 3


@dataclass(frozen=True)
class Promise:
    """Samples/s."""

    samples_per_s: float
    low: float | None = None
    high: float | None = None
    """None: too few windows to say."""


def promised(trials: Sequence[Sequence[float]], usual: float = USUAL_ON_CPU) -> Promise:
    """From the rates of each trial's windows, in the order of the trials; `usual` is
    the deviation to expect. Raises ValueError where there is no window."""
    means = [fmean(windows) for windows in trials]
    mean = fmean(means)
    if sum(map(len, trials)) < LEAST_WINDOWS:
        return Promise(mean)
    from scipy.stats import t  # type: ignore[import-untyped]  # takes half a second

    degrees = USUAL_DEGREES + len(trials) - 1
    expected = max((usual * mean) ** 2, _within(trials, means))
    between = sum((one - mean) ** 2 for one in means)
    variance = (USUAL_DEGREES * expected + between) / degrees
    drift = fmean([(b - a) ** 2 for a, b in pairwise(means)] or [0.0])
    deviation = math.sqrt(variance * (1 + 1 / len(trials)) + drift)
    half = float(t.ppf((1 + CONFIDENCE) / 2, degrees)) * deviation
    return Promise(mean, max(0.0, mean - half), mean + half)


def _within(trials: Sequence[Sequence[float]], means: Sequence[float]) -> float:
    """Variance of windows around the mean of their trial."""
    degrees = sum(map(len, trials)) - len(trials)
    squares = [
        (rate - mean) ** 2
        for windows, mean in zip(trials, means, strict=True)
        for rate in windows
    ]
    return sum(squares) / degrees if degrees else 0.0


def kept(
    came: float, tuned: Mapping[str, Any], tflops: float | None = None
) -> tuple[bool, str] | None:
    """Whether a training came to what conf/tuned promises (`tuned` as it writes it),
    and in words; None where it promises nothing. `tflops`: of plain products on this
    machine now. Where those have become slower or faster, so has the machine, and its
    part of the difference is no fault of the settings."""
    low, high = tuned.get("samples_per_s_low"), tuned.get("samples_per_s_high")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    text = (
        f"tuned settings: {low:,.1f} to {high:,.1f} samples/s were promised, "
        f"{came:,.1f} came"
    )
    if low <= came <= high:
        return True, f"{text}: inside"
    side = "below" if came < low else "above"
    speed = _speed(tuned, tflops)
    if low * speed <= came <= high * speed:
        return True, (
            f"{text}: {side}, but the machine itself runs at {speed:.2f} of its speed "
            f"in the tune, which makes {low * speed:,.1f} to {high * speed:,.1f} of it"
        )
    return False, (
        f"{text}: {side}. The machine is not as it was: other work beside it, or none; "
        "kedro run --pipelines=benchmark measures again"
    )


def _speed(tuned: Mapping[str, Any], tflops: float | None) -> float:
    """Of this machine over that in the tune; 1 where either is not known."""
    then = tuned.get("tflops_per_s")
    if not tflops or not isinstance(then, (int, float)) or then <= 0:
        return 1.0
    return tflops / then
