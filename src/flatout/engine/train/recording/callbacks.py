"""User-defined functions that receive the events of a training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.own_parts import own_part
from flatout.engine.train.own_metrics import NAME, number_of
from flatout.engine.train.recording.metrics_file import MetricsFile

logger = logging.getLogger(__name__)

PARAMETER = "train.callbacks"
TAKEN = ("train_", "validation_", "test_", "learning_rate", "grad_norm", "loader_")
"""Prefixes of flatout's own metrics."""
Callback = Callable[[str, int, dict[str, Any]], Any]


class Callbacks:
    """Calls the callbacks on the main rank. An error in one is logged, and the training
    continues; numbers that one returns become points of the metrics file."""

    def __init__(self, paths: Sequence[str], metrics: MetricsFile) -> None:
        """Raises SettingsError for a callback that cannot be created."""
        self._metrics = metrics
        self._callbacks = [(path, _made(path)) for path in paths]

    def call(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Call all with an `event` (log, evaluation, checkpoint, end) after a step."""
        found: dict[str, float] = {}
        for path, callback in self._callbacks:
            try:
                returned = callback(event, step, dict(values))
                found |= _figures(path, returned)
            except (Exception, SystemExit):
                logger.warning(
                    "%s: %s failed at step %d (%s); the training continues",
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
    """Select finite numbers whose names are not used by flatout."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        logger.warning("%s: %s must return a dict, not %r", PARAMETER, path, returned)
        return {}
    numbers = {str(name): number_of(value) for name, value in returned.items()}
    kept = {
        name: value
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
        if NAME.fullmatch(name) and not name.startswith(TAKEN)
    }
    if dropped := sorted(numbers.keys() - kept.keys()):
        logger.warning(
            "%s: %s: %s ignored: not a finite number, a name that MLflow refuses, or a "
            "name of flatout's",
            *(PARAMETER, path, ", ".join(dropped)),
        )
    return kept
