"""Check whether a training reaches the rate of the trials of its settings.

A training is one more process, later. It differs from the trials as they differ from
each other, and by the change of the machine's speed since then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEAST_TRAINED_S = 5.0
"""Shortest training that is checked, in seconds: two or three windows of a trial."""
SLOWER = 0.9
"""A training below this share of the slowest trial's rate is reported as slow."""


def kept(
    came: float, tuned: Mapping[str, Any], trained_s: float = math.inf
) -> tuple[bool, str] | None:
    """Return whether a training reached the rate that conf/tuned has of its trials, and
    a text; None if there is no rate. `came`: samples/s of the training; `tuned`: as the
    benchmark writes it; `trained_s`: seconds of the training."""
    low, high = tuned.get("samples_per_s_low"), tuned.get("samples_per_s_high")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    text = (
        f"tuned settings: their trials gave {low:,.1f} to {high:,.1f} samples/s, "
        f"{came:,.1f} came"
    )
    if low <= came <= high:
        return True, f"{text}: inside"
    side = "below" if came < low else "above"
    if trained_s < LEAST_TRAINED_S:
        return True, f"{text}: {side}, but {trained_s:.1f} s of training tell little"
    if came >= SLOWER * low:
        return True, f"{text}: {side}"
    return False, (
        f"{text}: {side}. The machine has other work now, or was changed: "
        "kedro run --pipelines=benchmark measures again"
    )
