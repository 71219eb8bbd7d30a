"""What rate a training with the recommended settings will have, and how surely.

A training is one more process, later: what it comes to differs from a trial's rate as
trials differ from each other, and by how far the machine drifts until then. Windows
inside of a trial say little of either. So the interval is a prediction for one more
trial (Student's t; Hahn & Meeker 1991, section 4.7). It is wider by what separates the
later half of the trials from the earlier one, and its centre leans to the later ones: a
host's speed wanders. A tune has two to twenty trials of the same settings, few for a
variance: what is known of such machines counts as some trials more, as by an inverse
gamma prior (Gelman et al. 2013, section 2.6).

Processors of a virtual machine are shared with others', which come and go: its speed
has spells of a minute, though none of its own programs takes a core. A tune that meets
one speed says nothing of the other, and one that meets both says too much.

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
QUIET_WAIT_PCT = 5.0
"""Of a trial's time, in which its main thread is ready to run and has no core: the most
on a quiet machine. On two such cores it is 1.3 to 4.4."""


@dataclass(frozen=True)
class Usual:
    """What is known of a machine's trials before there are any."""

    deviation: float
    """Standard, of processes that train the same: a share of their rate."""
    trials: int = 2
    """As how many it counts."""
    recent: float = 0.7
    """Weight of a trial over that of the next one."""
    drifts: bool = True
    """Whether what separates halves of a tune may go on: spells of a speed end."""


ON_GPU, ON_CPU = Usual(0.01), Usual(0.02)
ON_VIRTUAL_CPU = Usual(0.06, trials=32, recent=0.9, drifts=False)
"""Where its own programs leave it cores. Trials of 23 tunes deviate by 6.1 % there:
docs/results/2026-11-25_tuned-rate-virtual_2-cores.md."""


@dataclass(frozen=True)
class Promise:
    """Samples/s."""

    samples_per_s: float
    low: float | None = None
    high: float | None = None
    """None: too few windows to say."""


def promised(trials: Sequence[Sequence[float]], usual: Usual = ON_CPU) -> Promise:
    """From the rates of each trial's windows, in the order of the trials. Raises
    ValueError where there is no window."""
    rates = [harmonic_mean(windows) for windows in trials]  # samples over their time
    weights = [usual.recent**age for age in reversed(range(len(rates)))]
    centre = fmean(rates, weights)
    if sum(map(len, trials)) < LEAST_WINDOWS:
        return Promise(centre)
    from scipy.stats import t  # type: ignore[import-untyped]  # takes half a second

    degrees = usual.trials + len(rates) - 1
    expected = max((usual.deviation * centre) ** 2, _of_a_mean(trials))
    between = sum((rate - centre) ** 2 for rate in rates)
    variance = (usual.trials * expected + between) / degrees
    share = sum(weight**2 for weight in weights) / sum(weights) ** 2
    drift = _drift(rates) if usual.drifts else 0.0
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
