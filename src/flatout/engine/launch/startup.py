"""Checks that cost a training milliseconds and only cause warnings at its start."""

from __future__ import annotations

import logging
from pathlib import Path

from flatout.engine.machine import environment
from flatout.engine.machine.checks import disk_space, gpu_programs, threads
from flatout.engine.machine.driver import query_driver
from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)


def warn_at_start(settings: Settings, folder: Path) -> None:
    """Log each check that is not ok."""
    count = processes_here(settings)
    for found in (
        threads(settings.runtime, {}, count),
        disk_space(folder),
        gpu_programs(query_driver()),
    ):
        if found.status != "ok":
            logger.warning(
                "%s: %s. To solve it: %s", found.check, found.finding, found.fix
            )


def processes_here(settings: Settings) -> int:
    """Return the ranks of this machine, before anything is refused."""
    if environment.launched_from_outside():
        return environment.current_ranks().local_world_size
    wanted = settings.train.distributed.num_processes
    return (environment.nvidia_gpu_count() or 1) if wanted == "auto" else wanted
