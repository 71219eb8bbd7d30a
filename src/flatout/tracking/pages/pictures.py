"""Pictures of a finished training for people who look at its run: PNG, small."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_NAMES = 40
"""Of classes beside the confusion matrix; of more, every second or further one."""
MAX_NAME_LENGTH = 24
PAGES = {
    "benchmark": ("throughput", "phases", "memory", "waterfall"),
    "sweep": ("parallel", "importance", "history"),
}
"""Figures of Plotly that the catalog keeps, by what they are of."""


def draw(folder: Path, since_s: float = 0.0) -> list[Path]:
    """Draw into `folder` what it has a report of that was written at `since_s` (Unix
    time) or later. Never raises: no run ends by it."""
    drawn = []
    for source, target, picture in (
        ("train_history.csv", "training.png", _training),
        ("train_report.json", "phases.png", _phases),
        ("confusion_matrix.json", "confusion_matrix.png", _confusion),
    ):
        path = folder / source
        if not path.is_file() or path.stat().st_mtime < since_s:
            continue
        try:
            figure = picture(path)
            if figure is not None:
                figure.savefig(folder / target, dpi=100)
                drawn.append(folder / target)
        except Exception as error:
            logger.warning("%s could not be drawn: %s", target, error)
    pages = (_page(folder, name, since_s) for name in PAGES)
    return [*drawn, *filter(None, pages)]


def _page(folder: Path, name: str, since_s: float) -> Path | None:
    """The figures of a benchmark or a sweep as one page that needs no network."""
    files = [folder / f"{name}_{figure}.json" for figure in PAGES[name]]
    if not all(f.is_file() and f.stat().st_mtime >= since_s for f in files):
        return None
    page = folder / f"{name}.html"
    try:
        from plotly.io import from_json

        parts = [
            from_json(f.read_text(encoding="utf-8")).to_html(
                full_html=False, include_plotlyjs=not number
            )
            for number, f in enumerate(files)
        ]
        page.write_text("\n".join(parts), encoding="utf-8")
    except Exception as error:
        logger.warning("%s could not be drawn: %s", page.name, error)
        return None
    return page


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
    return figure


def _phases(path: Path) -> Any | None:
    """Where the training's wall time went; waiting for the loader is in the steps. None
    for a report of an earlier version."""
    parts = json.loads(path.read_text(encoding="utf-8")).get("phases_s")
    if not parts:
        return None
    figure, [axis] = _figure(1, 1)
    bars = axis.barh(list(parts), list(parts.values()))
    axis.bar_label(bars, fmt="%.1f")
    axis.set(xlabel="seconds")
    return figure


def _confusion(path: Path) -> Any | None:
    """None for a task without classes."""
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
    """Without pyplot, whose state is the whole process's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)
