"""What files of numbers and images most likely are: parameters of their environment,
and a line for people to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any

import pyarrow as pa

from flatout.engine.arrays import tables
from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.image_files import IMAGES
from flatout.engine.arrays.sources import ArraysError, Window
from flatout.engine.parameters import ModelSettings
from flatout.engine.tasks import task_of_labels
from flatout.project.init.guess import LABELS

SEEN_IMAGES = 50
LARGEST = 224
"""Height and width, pixels: what most checkpoints of images take."""
USUAL = (*LABELS, "y")
Found = tuple[dict[str, Any], str]


def look_at_samples(kind: str, path: Path, label: str | None = None) -> Found:
    """Parameters for `arrays` or `images`, and what they were guessed from; `label`:
    the column of a table that holds them. Raises ArraysError."""
    return _numbers(path, label) if kind == "arrays" else _images(path)


def holds_numbers(path: Path, label: str | None = None) -> bool:
    """Whether a table, or the first one of a folder, has numbers in all columns but
    that of a label."""
    labels = {*USUAL, *([label.casefold()] if label else [])}
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    table = next((f for f in files if f.suffix.lower() in tables.ENDINGS), None)
    if table is None:
        return False
    try:
        fields = list(tables.schema(table))
    except (OSError, ValueError):
        return False
    inputs = [one for one in fields if one.name.casefold() not in labels]
    return bool(inputs) and all(_is_number(one.type) for one in inputs)


def _is_number(kind: pa.DataType) -> bool:
    """Lists of whole numbers are tokens or keys more often than samples."""
    inner = getattr(kind, "value_type", None)
    if inner is not None:
        return bool(pa.types.is_floating(inner))
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def _numbers(path: Path, label: str | None) -> Found:
    source = ArrayFiles(path, (), None)
    if label is None:
        label = _label(source.names)
    if label not in source.names:
        raise ArraysError(_without_label(path, source.names, label))
    first = next(replace(source, label=label).windows())
    found: dict[str, Any] = {"arrays": {"path": str(path)}}
    found["split"] = {"label_column": label}
    task: str = ModelSettings.model_fields["task"].default
    if _is_measured(first):
        task = task_of_labels(pa.float64())
        found["model"] = {"task": task}
    shape = " x ".join(map(str, first.values.shape[1:]))
    return found, f"{shape} numbers a sample, {label} is the label; task {task}"


def _label(names: Iterable[str]) -> str | None:
    by_name = {name.casefold(): name for name in names}
    return next((by_name[usual] for usual in USUAL if usual in by_name), None)


def _without_label(path: Path, names: Iterable[str], label: str | None) -> str:
    columns = ", ".join(sorted(names))
    if label is not None:
        return f"{path} has no column {label}; it has {columns}"
    if path.suffix == ".npy":
        return f"{path} has no labels: save them beside it, as {path.stem}.label.npy"
    return (
        f"{path}: none of {columns} is called {', '.join(USUAL)}: name the one that "
        "holds the labels with --label-column"
    )


def _is_measured(window: Window) -> bool:
    """Fractions are no names of classes."""
    labels = [one for one in window.labels or () if isinstance(one, float)]
    return any(not one.is_integer() for one in labels)


def _images(path: Path) -> Found:
    files = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in IMAGES)
    seen = list(islice(files, SEEN_IMAGES))
    images: dict[str, Any] = {"path": str(path)}
    if not seen:  # a manifest names them
        return {"images": images}, "a manifest of images"
    opened = [found for file in seen if (found := _opened(file))]
    if not opened:
        raise ArraysError(f"{path}: none of its first images can be opened")
    sizes, modes = zip(*opened, strict=True)
    images["size"] = min(LARGEST, median_low(sizes))
    images["channels"] = 1 if set(modes) <= {"1", "L", "I;16"} else 3
    return {"images": images}, _told(path, images)


def _told(path: Path, images: Mapping[str, Any]) -> str:
    folders = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir()]
    colours = "grey" if images["channels"] == 1 else "colours"
    return (
        f"images of {len(folders)} classes ({', '.join(folders[:3])}"
        f"{', …' if len(folders) > 3 else ''}), as {images['size']} x "
        f"{images['size']} pixels, {colours}"
    )


def _opened(file: Path) -> tuple[int, str] | None:
    """Shorter side and mode; None of what is no image."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return min(image.size), image.mode
    except OSError:
        return None
