"""Divide the GPUs into sets. Trials run in parallel, one on each set."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flatout.engine.machine.environment import gpu_names, usable_cores
from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)


Devices = Mapping[str, str]
"""The environment variables that make only the GPUs of one trial visible to it. Without
a GPU, there are none, because the trials share the CPU cores."""


def sets_of(count: int) -> list[Devices]:
    """Return the variables for each set of `count` GPUs of this machine, or one set
    without a GPU. Raises SettingsError if the machine has too few devices."""
    names = gpu_names()
    here, kind = (len(names), "GPU") if names else (usable_cores(), "CPU core")
    if count > here:
        raise SettingsError(
            f"sweep.devices_per_trial={count}, but this machine has {here} {kind}"
            f"{'s' if here != 1 else ''} to use: set it to at most {here}"
        )
    if not names:
        return [{}]
    if idle := names[len(names) // count * count :]:
        logger.warning(
            "GPU %s stays idle: trials get %d GPUs each", ", ".join(idle), count
        )
    groups = zip(*[iter(names)] * count, strict=False)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
