"""The sets of GPUs that trials get. One sweep at a time trains on a GPU."""

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
    """The GPUs of one trial; no names on a CPU, whose cores trials share."""

    names: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Environment in which a trial sees only these."""
        return only_gpu(",".join(self.names)) if self.names else {}

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether they are this sweep's for the block: another sweep of this user on
        this machine may train on one of them."""
        with ExitStack() as locks:
            try:
                for card in sorted(map(_card, self.names)):
                    locks.enter_context(FileLock(_lock_file(card), timeout=0))
            except Timeout:
                locks.close()
                yield False
                return
            except OSError as error:  # no place for locks: better two trials than none
                logger.debug("GPUs are not locked: %s", error)
            yield True


def _card(name: str) -> str:
    """The same for each name of a card, another for that of another container."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return str(pynvml.nvmlDeviceGetUUID(found))
    except Exception:  # a name that is no index, or no driver to ask
        return name


def _lock_file(card: str) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir(), f"flatout_{user}_gpu_{card.replace('/', '_')}")


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
    if idle := names[len(names) // count * count :]:
        logger.warning(
            "GPU %s stays idle: trials get %d GPUs each", ", ".join(idle), count
        )
    groups = zip(*[iter(names)] * count, strict=False)
    return [Devices(tuple(group)) for group in groups]
