"""What rate a training with the recommended settings will have, and how surely.

A training is one more process, later: what it comes to differs from a trial's rate as
trials differ from each other, and by how far the machine drifts until then. Windows
inside of a trial say little of either. So the interval is a prediction for one more
trial (Student's t; Hahn & Meeker 1991, section 4.7). It is wider by what separates the
later half of the trials from the earlier one, and its centre leans to the later ones: a
host's speed wanders. A tune has two to twenty trials of the same settings, few for a
variance, which therefore has a scaled inverse chi-square prior (Gelman et al. 2013,
section 3.3).

The speed of a virtual machine may have spells of a minute, though none of its own
programs takes a core. A tune that meets one speed says nothing of the other, and one
that meets both says too much: there the prior counts for more than the trials. Spells
end, so what separates the halves does not widen it, where no other program explains it.

Windows of the configured settings speak for the recommended ones too, times the ratio
that was measured by turns: so all minutes of a tune are in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean
from typing import Any

CONFIDENCE = 0.9
LEAST_WINDOWS = 3
LEAST_TRAINED_S = 5.0
"""Of a training that is judged: two or three windows of a trial."""
QUIET_WAIT_PCT = 5.0
"""Of a trial's time, in which its main thread is ready to run and has no core: the most
on a quiet machine. On two such cores it is 1.3 to 4.4."""


@dataclass(frozen=True)
class Prior:
    """Of the variance of trials that train the same."""

    deviation: float
    """Standard deviation of their rates: a share of the rate."""
    degrees: int = 2
    """Degrees of freedom."""


ON_GPU, ON_CPU = Prior(0.01), Prior(0.02)
ON_VIRTUAL_CPU = Prior(0.06, degrees=32)
"""The deviation is that of trials in 23 tunes on one host. Trials of one tune share its
spells and tell little of others: so many degrees keep 23 of 23 intervals below 15 %.
docs/log.md."""
RECENT, RECENT_OF_SPELLS = 0.7, 0.9
"""Weight of a trial over that of the next one."""


@dataclass(frozen=True)
class Promise:
    """Samples/s."""

    samples_per_s: float
    low: float | None = None
    high: float | None = None
    """None: too few windows to say."""


def promised(
    trials: Sequence[Sequence[float]], prior: Prior = ON_CPU, *, drifts: bool = True
) -> Promise:
    """From the rates of each trial's windows, in the order of the trials; `drifts`:
    what separates their halves may go on. Raises ValueError where there is no window.
    """
    rates = [harmonic_mean(windows) for windows in trials]  # samples over their time
    recent = RECENT if drifts else RECENT_OF_SPELLS
    weights = [recent**age for age in reversed(range(len(rates)))]
    centre = fmean(rates, weights)
    if sum(map(len, trials)) < LEAST_WINDOWS:
        return Promise(centre)
    from scipy.stats import t  # type: ignore[import-untyped]  # takes half a second

    degrees = prior.degrees + len(rates) - 1
    # Trials differ at least as their windows let their means differ.
    expected = max((prior.deviation * centre) ** 2, _of_a_mean(trials))
    between = sum((rate - centre) ** 2 for rate in rates)
    variance = (prior.degrees * expected + between) / degrees
    share = sum(weight**2 for weight in weights) / sum(weights) ** 2
    drift = _drift(rates) if drifts else 0.0
    deviation = math.sqrt(variance * (1 + share) + drift**2)
    half = float(t.ppf((1 + CONFIDENCE) / 2, degrees)) * deviation
    return Promise(centre, max(0.0, centre - half), centre + half)


def _of_a_mean(trials: Sequence[Sequence[float]]) -> float:
    """Variance that a trial's rate has from that of its windows."""
    windows = sum(map(len, trials))
    degrees = windows - len(trials)
    squares = [(rate - fmean(trial)) ** 2 for trial in trials for rate in trial]
    return sum(squares) / degrees / (windows / len(trials)) if degrees else 0.0


def _drift(rates: Sequence[float]) -> float:
    """From the earlier half of the trials to the later one."""
    half = len(rates) // 2
    return fmean(rates[half:]) - fmean(rates[:half]) if half else 0.0


def kept(
    came: float,
    tuned: Mapping[str, Any],
    tflops: float | None = None,
    trained_s: float = math.inf,
) -> tuple[bool, str] | None:
    """Whether a training came to what conf/tuned promises (`tuned` as it writes it),
    and in words; None where it promises nothing. `tflops`: of plain products on this
    machine now. Where those have become slower or faster, so has the machine, and its
    part of the difference is no fault of the settings. `trained_s`: seconds
    of the training; of a few the rate may differ by chance."""
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
    if trained_s < LEAST_TRAINED_S:
        return True, f"{text}: {side}, but {trained_s:.1f} s of training tell little"
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
