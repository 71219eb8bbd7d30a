"""Tuned parameters: checks of their place of measurement and of the rate reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)


def has_mismatches(settings: Settings, trained_on: Any) -> bool:
    """Warn if the tuned parameters were measured under other conditions than these."""
    differences = tuned_mismatches(settings, trained_on)
    if differences:
        logger.warning(
            "The tuned parameters were measured with another %s. They still train "
            "right, but may be slow: kedro run --pipelines=benchmark measures again",
            "; another ".join(differences),
        )
    return bool(differences)


def log_rate_check(tuned: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Log whether the training reached the rate of the trials."""
    if not (rate := report["samples_per_s"]):
        return
    if found := kept(rate, tuned, report["train_wall_s"]):
        inside, text = found
        logger.log(logging.INFO if inside else logging.WARNING, text)


def tuned_mismatches(settings: Settings, trained_on: Any) -> list[str]:
    """List differences between the measurement of the tuned parameters and this run."""
    # These modules import torch; the training needs it anyway.
    from flatout.engine.benchmark.recommend import mismatches, provenance
    from flatout.engine.launch.job_files import token_key
    from flatout.engine.launch.launch import resolve_processes
    from flatout.engine.machine.environment import device_name
    from flatout.engine.rows.rows import rows_from_dataset

    here = provenance(
        settings,
        device_name(),
        resolve_processes(settings.train.distributed),
        token_key(rows_from_dataset(trained_on)),
    )
    return mismatches(settings.tuned, here)


LEAST_TRAINED_S = 5.0
"""Shortest training that is checked, in seconds: two or three windows of a trial."""
SLOWER = 0.9
"""A training below this share of the slowest trial's rate is reported as slow."""


def kept(
    rate: float, tuned: Mapping[str, Any], trained_s: float = math.inf
) -> tuple[bool, str] | None:
    """Return whether a training reached the rate that conf/tuned has of its trials, and
    a text; None if there is no rate. `rate`: samples/s of the training; `tuned`: as the
    benchmark writes it; `trained_s`: seconds of the training."""
    low, high = tuned.get("samples_per_s_low"), tuned.get("samples_per_s_high")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    side = "inside" if low <= rate <= high else "below" if rate < low else "above"
    text = (
        f"tuned settings: their trials gave {low:,.1f} to {high:,.1f} samples/s, "
        f"this training {rate:,.1f}: {side}"
    )
    if rate >= SLOWER * low:
        return True, text
    if trained_s < LEAST_TRAINED_S:
        return True, f"{text}, but {trained_s:.1f} s of training are too short"
    return False, (
        f"{text}. The machine has other work now, or was changed: kedro run "
        "--pipelines=benchmark measures again"
    )
