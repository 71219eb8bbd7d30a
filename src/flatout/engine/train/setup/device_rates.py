"""Comparison of the ranks' GPUs before a training, because all wait for the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

PROBE_S = 0.2
"""Seconds of matrix products on each GPU."""
SLOW_SHARE = 0.85
"""A GPU below this share of the median rate is named."""


def slow_devices(rates: Sequence[float]) -> tuple[str, ...]:
    """Return a note for each slow GPU. `rates`: TFLOP/s of large products by rank."""
    usual = median(rates)
    return tuple(
        f"the GPU of rank {rank} computes {rate:,.0f} TFLOP/s, the median of all ranks "
        f"is {usual:,.0f}, and all ranks wait for the slowest: check it for other "
        "programs, heat and power limits (nvidia-smi)"
        for rank, rate in enumerate(rates)
        if rate < SLOW_SHARE * usual
    )
