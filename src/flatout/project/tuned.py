"""Tuned parameters: checks of their place of measurement and of the rate reached."""

from __future__ import annotations

import logging
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


def tell_whether_kept(tuned: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Log whether the training reached the rate of the trials."""
    from flatout.engine.benchmark.promise import kept

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
    from flatout.engine.rows.opening import rows_from_dataset

    here = provenance(
        settings,
        device_name(),
        resolve_processes(settings.train.distributed),
        token_key(rows_from_dataset(trained_on)),
    )
    return mismatches(settings.tuned, here)
