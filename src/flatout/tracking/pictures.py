"""Small PNG pictures of a finished training, for the pages of its run."""

from __future__ import annotations

import csv
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
    drawn = []
    sources = {path.name: path for path in reports}
    for source, target, picture in (
        ("train_history.csv", "training.png", _training),
        ("confusion_matrix.json", "confusion_matrix.png", _confusion),
    ):
        try:
            figure = picture(sources[source]) if source in sources else None
            if figure is not None:
                figure.savefig(folder / target, dpi=100)
                drawn.append(folder / target)
        except Exception as error:
            logger.warning("%s could not be drawn: %s", target, error)
    return drawn


def _training(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    figure, axes = _figure(1, 2)
    for axis, column in zip(axes, ("loss", "samples_per_s"), strict=True):
        axis.plot(steps, [float(row[column] or "nan") for row in rows])
        axis.set(xlabel="step", ylabel=column.replace("_per_s", "/s"))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    if evaluations := _evaluations(path.with_name("train_metrics.jsonl")):
        axes[0].plot(list(evaluations), list(evaluations.values()), "o-")
        axes[0].legend(["training", "validation"])
    return figure


def _evaluations(path: Path) -> dict[int, float]:
    """Return the validation loss by step."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    points = [json.loads(line) for line in lines]
    name = "validation_loss"
    return {p["step"]: p["metrics"][name] for p in points if name in p["metrics"]}


def _confusion(path: Path) -> Any | None:
    """Draw the confusion matrix; None for a task without classes."""
    confusion = json.loads(path.read_text(encoding="utf-8"))
    if not confusion:
        return None
    names = [str(name)[:MAX_NAME_LENGTH] for name in confusion["label_names"]]
    every = -(-len(names) // MAX_NAMES)
    places, shown = range(0, len(names), every), names[::every]
    figure, [axis] = _figure(1, 1)
    image = axis.imshow(confusion["counts"], cmap="Blues")
    axis.set(xlabel="predicted class", ylabel="true class")
    axis.set_xticks(places, shown, rotation=90, parse_math=False)
    axis.set_yticks(places, shown, parse_math=False)
    figure.colorbar(image, label="rows")
    return figure


def _figure(rows: int, columns: int) -> Any:
    """Make a figure without pyplot, whose state is global in the process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)
