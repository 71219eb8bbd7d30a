"""Divide the GPUs into sets, one for each trial that runs at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flatout.engine.machine.environment import gpu_names, usable_cores
from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)


Devices = Mapping[str, str]
"""Environment variables that make only a trial's GPUs visible to it. They are empty on
a CPU, whose cores the trials share."""


def sets_of(count: int) -> list[Devices]:
    """Return this machine's GPUs in sets of `count`, or a single set if there is no
    GPU. Raises SettingsError if there are fewer than `count` GPUs, or fewer CPU cores
    on a machine without a GPU."""
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
