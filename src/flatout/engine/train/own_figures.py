"""Figures by custom functions: of an evaluation (`train.compute_metrics`), and of the
events of a training (`train.callbacks`)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.engine.parameters import SettingsError, TrainSettings, near_or_all
from flatout.engine.parameters.own_parts import own_part
from flatout.engine.tasks import Metrics, Task, figures_of
from flatout.engine.train.recording.metrics_file import MetricsFile

logger = logging.getLogger(__name__)

PARAMETER = "train.compute_metrics"
CALLBACKS = "train.callbacks"
OF_DATA = (ValueError, ArithmeticError)
"""Errors of a correct function on few rows, for example of a single class."""
NAME = re.compile(r"[\w\-. :/]+", re.ASCII)
"""Names that MLflow accepts for a metric; with another name it refuses all points."""
TAKEN = ("train_", "validation_", "test_", "learning_rate", "grad_norm", "loader_")
"""Prefixes of flatout's own metrics."""
NAME_RULE = "use letters, digits, spaces and _ - . : / in the name of a figure"
Callback = Callable[[str, int, dict[str, Any]], Any]


@dataclass(frozen=True)
class OwnMetrics:
    """A function of NumPy arrays (predictions, labels) -> figures by name."""

    path: str
    function: Callable[[Any, Any], Any]
    taken: frozenset[str]
    """Names of the task's figures."""
    tried: bool = False
    """True before the training, when errors end it."""

    @classmethod
    def of(
        cls, train: TrainSettings, task: Task, *, tried: bool = False
    ) -> OwnMetrics | None:
        """Return it; None without a function. Raises SettingsError."""
        if train.compute_metrics is None:
            return None
        path, known = train.compute_metrics, figures_of(task.settings, type(task))
        taken = frozenset({"loss", *known})
        return cls(path, own_part(path, PARAMETER), taken, tried)

    def figures(self, predictions: Any, labels: Any) -> dict[str, float]:
        """Return figures of predictions (N, ...) fp32, labels (N, ...); empty on
        failure. Before training, raises SettingsError for errors not caused by data."""
        try:
            found = self.function(predictions, labels)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if self.tried and not isinstance(error, OF_DATA):
                raise SettingsError(
                    f"{PARAMETER}: {self.path} fails on {len(labels)} validation rows "
                    f"({reason})"
                ) from error
            logger.warning(
                "%s: %s fails on %d rows (%s): its figures are missing",
                *(PARAMETER, self.path, len(labels), reason),
                exc_info=not self.tried,
            )
            return {}
        figures, faults = checked_figures(PARAMETER, found, self.taken.__contains__)
        for fault in faults:
            message = f"{PARAMETER}: {self.path} {fault}"
            if self.tried:
                raise SettingsError(message)
            logger.warning("%s: it is left out", message)
        return figures


class OwnFigures(Metrics):
    """The task's figures, and those of a function of all predictions."""

    def __init__(self, own: OwnMetrics, task: Task, device: torch.device) -> None:
        self._own, self._task = own, task
        self._inner = task.metrics(device)
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, ...), labels (k, ...)."""
        self._logits.append(logits.float())
        self._labels.append(labels)
        if self._inner is not None:
            self._inner.update(logits, labels)

    def tensors(self) -> list[Tensor]:
        """Return the task's tensors."""
        return [] if self._inner is None else self._inner.tensors()

    def kept(self) -> list[list[Tensor]]:
        """Return all logits and labels, and the task's kept data."""
        inner = [] if self._inner is None else self._inner.kept()
        return [self._logits, self._labels, *inner]

    def compute(self) -> dict[str, Any]:
        """Return figures of the rows with a target."""
        found = {} if self._inner is None else self._inner.compute()
        labels = torch.cat(self._labels)
        real = self._task.real(labels)
        logits, labels = torch.cat(self._logits)[real], labels[real]
        if not len(labels):
            return found
        return found | self._own.figures(logits.cpu().numpy(), labels.cpu().numpy())


def checked_figures(
    parameter: str, found: Any, is_taken: Callable[[str], bool]
) -> tuple[dict[str, float], list[str]]:
    """Return the finite numbers that a custom part of `parameter` returned, by name,
    and a fault for each other value. `is_taken`: whether flatout has such a name."""
    if not isinstance(found, Mapping):
        return {}, [f"returns {type(found).__name__}, not a dict of numbers"]
    figures, faults = {}, []
    for name, given in found.items():
        value = number_of(given)
        if not isinstance(name, str) or value is None:
            faults.append(f"returns {name!r}: {given!r}: give a number")
        elif not NAME.fullmatch(name):
            faults.append(f"returns {name!r}: {NAME_RULE}")
        elif is_taken(name):
            faults.append(f"returns {name}, which is a figure of flatout's")
        elif not math.isfinite(value):
            logger.warning("%s: %s is %s and left out", parameter, name, value)
        else:
            figures[name] = value
    return figures, faults


def number_of(value: Any) -> float | None:
    """Return a number of Python, NumPy or PyTorch; None for anything else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def check_metric(train: TrainSettings, task: Task, found: Mapping[str, float]) -> None:
    """Raise SettingsError if `train.metric` is not in `found`, the figures of a test
    evaluation before the training."""
    known = figures_of(task.settings, type(task))
    name, own = train.metric, found.keys() - {"loss", *known}
    if name is None or name in known or name in found or not own:
        return  # without figures of its own, the function has failed on these few rows
    near = near_or_all(name, {*known, *found}, "")
    raise SettingsError(
        f"train.metric: neither the task nor {train.compute_metrics} has a figure "
        f"{name!r}; {near}"
    )


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
                    *(CALLBACKS, path, step, event),
                    exc_info=True,
                )
        self._metrics.write(step, found)


def _made(path: str) -> Callback:
    part = own_part(path, CALLBACKS)
    try:
        made: Callback = part() if isinstance(part, type) else part
    except Exception as error:
        raise SettingsError(f"{CALLBACKS}: {path} cannot be made: {error}") from error
    return made


def _figures(path: str, returned: Any) -> dict[str, float]:
    """Select finite numbers whose names are not used by flatout."""
    if returned is None:
        return {}
    figures, faults = checked_figures(
        CALLBACKS, returned, lambda name: name.startswith(TAKEN)
    )
    for fault in faults:
        logger.warning("%s: %s %s: it is left out", CALLBACKS, path, fault)
    return figures
