"""Sets of GPUs, one for each running trial."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flatout.engine.machine.environment import gpu_names, only_gpu, usable_cores
from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Devices:
    """The GPUs of one trial. On a CPU there are no names: trials share its cores."""

    names: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment in which a trial sees only these GPUs."""
        return only_gpu(",".join(self.names)) if self.names else {}


def sets_of(count: int) -> list[Devices]:
    """Return this machine's GPUs in sets of `count`; its CPU if it has no GPU. Raises
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
