"""The sets of GPUs that trials get, each of which one sweep at a time trains on."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from flatout.engine.machine.environment import gpu_names, only_gpu, usable_cores
from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Devices:
    """Of one trial; of a CPU, which has all cores, no names."""

    names: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """With which a trial's process sees these alone."""
        return only_gpu(",".join(self.names)) if self.names else {}

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether they are this sweep's for the block: another sweep of this user on
        this machine may train on one of them."""
        with ExitStack() as locks:
            try:
                for name in self.names:
                    locks.enter_context(FileLock(_lock_file(name), timeout=0))
            except Timeout:
                locks.close()
                yield False
                return
            yield True


def _lock_file(name: str) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir(), f"flatout_{user}_gpu_{name.replace('/', '_')}")


def sets_of(count: int) -> list[Devices]:
    """This machine's GPUs in sets of `count`; without one its CPU. Raises
    SettingsError where it has fewer."""
    names = gpu_names()
    here, kind = (len(names), "GPU") if names else (usable_cores(), "CPU core")
    if count > here:
        raise SettingsError(
            f"sweep.devices_per_trial={count}, but this machine has {here} {kind}"
            f"{'s' if here != 1 else ''} to use: set it to at most {here}"
        )
    if not names:
        return [Devices()]
    if over := names[len(names) // count * count :]:
        logger.warning(
            "GPU %s stays idle: trials get %d GPUs each", ", ".join(over), count
        )
    groups = zip(*[iter(names)] * count, strict=False)
    return [Devices(tuple(group)) for group in groups]
