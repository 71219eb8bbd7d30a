"""Call custom functions: metrics in evaluations (`train.compute_metrics`), and
callbacks at events of a run (`train.callbacks`)."""

from __future__ import annotations

import inspect
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
"""Errors that even a correct function may raise if it gets only a few rows, e.g.
because all of them belong to one class."""
NAME = re.compile(r"[\w\-. :/]+", re.ASCII)
"""Matches the metric names that MLflow accepts. If one name is invalid, MLflow rejects
all metrics that are sent with it."""
TAKEN = ("train_", "validation_", "test_", "learning_rate", "grad_norm", "loader_")
"""The prefixes of flatout's own metrics."""
NAME_RULE = "use letters, digits, spaces and _ - . : / in the name of a metric"
Callback = Callable[[str, int, dict[str, Any]], Any]


@dataclass(frozen=True)
class OwnMetrics:
    """A custom function that maps NumPy predictions and labels to metrics."""

    path: str
    function: Callable[[Any, Any], Any]
    taken: frozenset[str]
    """The names of the task's metrics, which the function must not return."""
    tried: bool = False
    """Whether the function is being tested before training. Errors then end the run."""

    @classmethod
    def of(
        cls, train: TrainSettings, task: Task, *, tried: bool = False
    ) -> OwnMetrics | None:
        """Load the function set in `train.compute_metrics`. Return None if the
        parameter is null. Raises SettingsError if the function cannot be loaded."""
        if train.compute_metrics is None:
            return None
        path, known = train.compute_metrics, figures_of(task.settings, type(task))
        taken = frozenset({"loss", *known})
        return cls(path, own_part(path, PARAMETER), taken, tried)

    def figures(self, predictions: Any, labels: Any) -> dict[str, float]:
        """Return the metrics for fp32 predictions (N, ...) and labels (N, ...), or an
        empty dict if the function fails. In the test before training, a failure raises
        SettingsError unless it may be due to the small number of rows."""
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
                "%s: %s fails on %d rows (%s): its metrics are missing",
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
    """The metrics of the task together with the custom metrics."""

    def __init__(self, own: OwnMetrics, task: Task, device: torch.device) -> None:
        self._own, self._task = own, task
        self._inner = task.metrics(device)
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits (k, ...) and labels (k, ...)."""
        self._logits.append(logits.float())
        self._labels.append(labels)
        if self._inner is not None:
            self._inner.update(logits, labels)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the task's metrics."""
        return [] if self._inner is None else self._inner.tensors()

    def kept(self) -> list[list[Tensor]]:
        """Return all logits and labels, and the tensors kept by the task's metrics."""
        inner = [] if self._inner is None else self._inner.kept()
        return [self._logits, self._labels, *inner]

    def compute(self) -> dict[str, Any]:
        """Return all metrics. The custom function receives only rows with a target."""
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
    """Return the finite numbers in `found`, the return value of a custom function, and
    a message for each invalid item. `is_taken` returns whether flatout uses a name."""
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
            faults.append(f"returns {name}, which is a metric of flatout's")
        elif not math.isfinite(value):
            logger.warning("%s: %s is %s and left out", parameter, name, value)
        else:
            figures[name] = value
    return figures, faults


def number_of(value: Any) -> float | None:
    """Convert a Python, NumPy or PyTorch number to a float. Return None otherwise."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def check_metric(train: TrainSettings, task: Task, found: Mapping[str, float]) -> None:
    """Raise SettingsError if `train.metric` is neither a metric of the task nor in
    `found`, the metrics computed in the test before training."""
    known = figures_of(task.settings, type(task))
    name, own = train.metric, found.keys() - {"loss", *known}
    if name is None or name in known or name in found or not own:
        return  # if `own` is empty, the function has failed on these few rows
    near = near_or_all(name, {*known, *found}, "")
    raise SettingsError(
        f"train.metric: neither the task nor {train.compute_metrics} has a metric "
        f"{name!r}; {near}"
    )


class Callbacks:
    """Calls the callbacks on the main rank. If a callback fails, the error is logged
    and training continues. Numbers that callbacks return are written to `metrics`."""

    def __init__(self, paths: Sequence[str], metrics: MetricsFile) -> None:
        """Import and create the callbacks at the dotted `paths`. Raises SettingsError
        if this fails."""
        self._metrics = metrics
        self._callbacks = [(path, _made(path)) for path in paths]

    def call(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Call all callbacks. `event` is log, evaluation, checkpoint or end."""
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
        inspect.signature(made).bind("log", 1, {})
    except Exception as error:
        raise SettingsError(
            f"{CALLBACKS}: {path}(event, step, values) cannot be called: {error}"
        ) from error
    return made


def _figures(path: str, returned: Any) -> dict[str, float]:
    """Return the valid numbers that a callback returned, and warn of invalid items."""
    if returned is None:
        return {}
    figures, faults = checked_figures(
        CALLBACKS, returned, lambda name: name.startswith(TAKEN)
    )
    for fault in faults:
        logger.warning("%s: %s %s: it is left out", CALLBACKS, path, fault)
    return figures
