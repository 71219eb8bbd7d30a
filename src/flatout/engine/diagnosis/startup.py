"""The checks that cost a training nothing: said at its start, and no more than said."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from flatout.engine.diagnosis import device, machine
from flatout.engine.diagnosis.finding import Finding, examine
from flatout.engine.diagnosis.installation import bytecode, versions
from flatout.engine.machine import environment
from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)


def quick_checks(settings: Settings, folder: Path) -> list[Finding]:
    """Milliseconds each; no network, nothing left behind, no torch."""
    usable = environment.usable_cores()
    count = processes_here(settings)
    threads = partial(machine.threads, settings.runtime, {}, usable, count)
    return examine(
        {
            "versions": versions,
            "bytecode": bytecode,
            "cores": machine.cores,
            "threads": threads,
            "memory": machine.memory,
            "disk": partial(machine.disk_space, folder),
            "GPU memory": lambda: device.gpu_neighbours(device.look_at_driver()),
        }
    )


def processes_here(settings: Settings) -> int:
    """Ranks of this machine, before anything is refused."""
    if environment.launched_from_outside():
        return environment.current_ranks().local_world_size
    wanted = settings.train.distributed.num_processes
    return (environment.nvidia_gpu_count() or 1) if wanted == "auto" else wanted


def warn_at_start(settings: Settings, folder: Path) -> None:
    """Log what is not ok."""
    for found in quick_checks(settings, folder):
        if found.status != "ok":
            logger.warning("%s: %s. To solve it: %s", *_texts(found))


def _texts(found: Finding) -> tuple[str, str, str]:
    return found.check, found.finding, found.fix or "kedro doctor tells more"
