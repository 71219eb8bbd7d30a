"""Functions of one's own that are told what happens in a training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.own_parts import own_part
from flatout.engine.train.own_metrics import number_of
from flatout.engine.train.recording.metrics_file import MetricsFile

logger = logging.getLogger(__name__)

PARAMETER = "train.callbacks"
TAKEN = ("train_", "validation_", "test_", "learning_rate", "grad_norm", "loader_")
"""How names of flatout's own figures begin."""
Callback = Callable[[str, int, dict[str, Any]], Any]


class Callbacks:
    """Calls them on the main rank. What goes wrong in one is logged, and the training
    goes on; figures that one returns become points of the metrics file."""

    def __init__(self, paths: Sequence[str], metrics: MetricsFile) -> None:
        """Raises SettingsError for one that cannot be made."""
        self._metrics = metrics
        self._callbacks = [(path, _made(path)) for path in paths]

    def tell(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """`event`: log, evaluation, checkpoint or end, after `step` steps."""
        found: dict[str, float] = {}
        for path, callback in self._callbacks:
            try:
                returned = callback(event, step, dict(values))
                found |= _figures(path, returned)
            except (Exception, SystemExit):
                logger.warning(
                    "%s: %s failed at step %d (%s); the training goes on",
                    *(PARAMETER, path, step, event),
                    exc_info=True,
                )
        self._metrics.write(step, found)


def _made(path: str) -> Callback:
    part = own_part(path, PARAMETER)
    try:
        made: Callback = part() if isinstance(part, type) else part
    except Exception as error:
        raise SettingsError(f"{PARAMETER}: {path} cannot be made: {error}") from error
    return made


def _figures(path: str, returned: Any) -> dict[str, float]:
    """Those that are finite numbers, under names that flatout has not given."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        logger.warning("%s: %s returns no dict: %r", PARAMETER, path, returned)
        return {}
    numbers = {str(name): number_of(value) for name, value in returned.items()}
    kept = {
        name: value
        for name, value in numbers.items()
        if value is not None and math.isfinite(value) and not name.startswith(TAKEN)
    }
    if dropped := sorted(numbers.keys() - kept.keys()):
        logger.warning(
            "%s: %s: %s left out: no finite number, or a name that flatout has",
            *(PARAMETER, path, ", ".join(dropped)),
        )
    return kept
