"""The sets of GPUs that trials get. One sweep at a time trains on a GPU."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from flatout.engine.machine.environment import gpu_names, only_gpu, usable_cores
from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Devices:
    """The GPUs of one trial. On a CPU there are no names: trials share its cores."""

    names: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Environment in which a trial sees only these."""
        return only_gpu(",".join(self.names)) if self.names else {}


def sets_of(count: int) -> list[Devices]:
    """This machine's GPUs in sets of `count`; its CPU if it has no GPU. Raises
    SettingsError if it has fewer."""
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


@contextmanager
def reserved(devices: Sequence[Devices]) -> Iterator[None]:
    """Wait until no other sweep of this user trains on these GPUs, and keep others off
    them inside the block. The locks end with the process."""
    names = [name for one in devices for name in one.names]
    with ExitStack() as locks:
        for card in sorted(map(_card, names)):  # one order: nobody waits in a circle
            lock = FileLock(_lock_file(card))
            try:
                locks.enter_context(lock.acquire(timeout=0))
            except Timeout:
                logger.info("GPU %s: another sweep trains on it, waiting", card)
                locks.enter_context(lock.acquire())
            except OSError as error:  # no place for locks
                logger.debug("GPU %s is not locked: %s", card, error)
        yield


def _card(name: str) -> str:
    """The card's UUID: containers and CUDA_VISIBLE_DEVICES number cards differently."""
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
