"""A PNG picture of the confusion matrix, for the page of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_NAMES = 40
"""Class names in a confusion matrix; of more, every second or further is shown."""
MAX_NAME_LENGTH = 24


def draw(reports: list[Path], folder: Path) -> list[Path]:
    """Draw a run's reports into `folder`. Never raises, so that no run fails by it."""
    target = folder / "confusion_matrix.png"
    source = next((p for p in reports if p.name == "confusion_matrix.json"), None)
    try:
        figure = source and _confusion(source)
        if figure is None:
            return []
        figure.savefig(target, dpi=100)
    except Exception as error:
        logger.warning("%s could not be drawn: %s", target.name, error)
        return []
    return [target]


def _confusion(path: Path) -> Any | None:
    """Draw the confusion matrix; None for a task without classes. Without pyplot, whose
    state is global in the process."""
    from matplotlib.figure import Figure

    confusion = json.loads(path.read_text(encoding="utf-8"))
    if not confusion:
        return None
    names = [str(name)[:MAX_NAME_LENGTH] for name in confusion["label_names"]]
    every = -(-len(names) // MAX_NAMES)
    places, shown = range(0, len(names), every), names[::every]
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(confusion["counts"], cmap="Blues")
    axis.set(xlabel="predicted class", ylabel="true class")
    axis.set_xticks(places, shown, rotation=90, parse_math=False)
    axis.set_yticks(places, shown, parse_math=False)
    figure.colorbar(image, label="rows")
    return figure
