"""Helpers for tasks with named classes or labels and calibrated probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.files.calibration import Calibration, requested

if TYPE_CHECKING:
    from flatout.engine.parameters import ModelSettings, Settings


class Calibrated:
    """Mixin for tasks that predict a probability for each class or label."""

    settings: ModelSettings
    label_names: tuple[str, ...]
    calibration: Calibration = Calibration()
    """The calibration of a saved model. Training uses the default calibration."""

    @property
    def thresholded(self) -> tuple[str, ...]:
        """The names of the labels or classes that have a decision threshold. Of two
        classes, only the second has a threshold."""
        return self.label_names

    def cuts(self) -> list[float]:
        """Return, for each name in `thresholded`, the calibrated logit above which the
        name is predicted. During training, `auto` means a probability of 0.5."""
        given, found = self.settings.label_threshold, self.calibration
        if given != "auto":  # a temperature never changes the predicted class
            return [_logit(given) / found.temperature] * len(self.thresholded)
        return [_logit((found.thresholds or {}).get(n, 0.5)) for n in self.thresholded]


def calibration_faults(settings: Settings, task: type) -> list[str]:
    """Return a message for each enabled option that needs class probabilities. The list
    is empty if `task` provides probabilities."""
    if issubclass(task, Calibrated):
        return []
    return [
        f"{name} needs a probability for each class, which {settings.model.task} does "
        f"not have: set it to {default}"
        for name, default in requested(settings).items()
    ]


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def unknown_label(labels: Any, names: Sequence[str]) -> str | None:
    """Return a message if `labels` contains labels that are not in `names`, else None.
    `labels` is an Arrow column of names or of lists of names."""
    rows = pa.chunked_array([pa.array(range(len(labels)), pa.int64())])
    if pa.types.is_list(labels.type):
        rows, labels = pc.list_parent_indices(labels), pc.list_flatten(labels)
    unknown = pc.invert(pc.is_in(labels, pa.array(names, pa.string())))
    if not (count := pc.count_distinct(rows.filter(unknown)).as_py()):
        return None
    first = pc.index(unknown, True).as_py()
    return (
        f"{count} rows have a label that train does not have, the first "
        f"{labels[first].as_py()!r} in row {rows[first].as_py()}. Add rows with this "
        "label to train, or remove these"
    )


def named_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the model config keys that map class numbers to names and back."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
