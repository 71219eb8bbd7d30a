"""Check whether tuned parameters fit a run, and whether the run is as fast as the
trials that measured them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)

LEAST_TRAINED_S = 5.0
"""Minimum training time for a reliable throughput: two or three windows of a trial."""
SLOWER = 0.9
"""A run is slow if its throughput is below this fraction of the slowest trial's."""


def tuned_mismatches(settings: Settings, trained_on: Any) -> list[str]:
    """Return the differences between this run's device, model, data and versions and
    those for which the parameters were tuned. They are also logged as a warning.
    `trained_on` are the training rows."""
    # These modules import torch, which training needs anyway.
    from flatout.engine.benchmark.recommend import mismatches, provenance
    from flatout.engine.launch.job_files import token_key
    from flatout.engine.launch.launch import resolve_processes
    from flatout.engine.machine.environment import device_name
    from flatout.engine.rows.rows import rows_from_dataset

    devices = resolve_processes(settings.train.distributed)
    key = token_key(rows_from_dataset(trained_on))
    here = provenance(settings, device_name(), devices, key)
    if found := mismatches(settings.tuned, here):
        logger.warning(
            "The tuned parameters were measured with another %s. They still "
            "work, but may be slow: kedro run --pipelines=benchmark measures again",
            "; another ".join(found),
        )
    return found


def log_rate_check(tuned: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Log whether the throughput in the train `report` is inside the range of the
    trials in `tuned`. This is a warning if the run was much slower."""
    rate, trained_s = report["samples_per_s"], report["train_wall_s"]
    low, high = tuned.get("samples_per_s_low"), tuned.get("samples_per_s_high")
    if not (rate and isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return
    text = "inside" if low <= rate <= high else "below" if rate < low else "above"
    level = logging.INFO
    if rate < SLOWER * low and trained_s < LEAST_TRAINED_S:
        text += f", but {trained_s:.1f} s of training are too short"
    elif rate < SLOWER * low:
        level = logging.WARNING
        text += (
            ". The machine is busy, or has changed: kedro run "
            "--pipelines=benchmark measures again"
        )
    logger.log(
        level,
        "tuned settings: their trials gave %s to %s samples/s, this training %s: %s",
        *(f"{value:,.1f}" for value in (low, high, rate)),
        text,
    )
