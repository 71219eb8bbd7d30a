"""What rate a training with the recommended settings will have, and how surely.

The interval is a prediction for one more window: mean ± t * s * sqrt(1 + 1/n) over n
windows (Hahn & Meeker 1991, section 4.7); nine of ten trainings should lie within.
Windows of the configured settings speak for the recommended ones too, times the ratio
that was measured by turns: so all minutes of a tune are in it, and what the host did
in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

CONFIDENCE = 0.9
LEAST_SHARE = 0.02
"""Half of the interval, at least: rows differ between windows and a whole epoch."""
LEAST_WINDOWS = 3


@dataclass(frozen=True)
class Promise:
    """Samples/s."""

    samples_per_s: float
    low: float | None = None
    high: float | None = None
    """None: too few windows to say."""


def promised(
    rates: Sequence[float], configured: Sequence[float] = (), gain: float = 1.0
) -> Promise:
    """Of windows of the recommended settings, and of the configured ones, which they
    are `gain` times as fast as. Raises ValueError where there is no window."""
    found = [*rates, *(gain * rate for rate in configured)]
    mean = fmean(found)
    if len(found) < LEAST_WINDOWS:
        return Promise(mean)
    from scipy.stats import t  # type: ignore[import-untyped]  # takes half a second

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(found) - 1))
    half = quantile * stdev(found) * math.sqrt(1 + 1 / len(found))
    half = max(half, LEAST_SHARE * mean)
    return Promise(mean, max(0.0, mean - half), mean + half)


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
