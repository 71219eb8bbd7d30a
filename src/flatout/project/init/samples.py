"""Parameters of the environments for numbers and images, derived from the files."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any

import pyarrow as pa

from flatout.engine.arrays import tables
from flatout.engine.arrays.image_files import IMAGES
from flatout.project.init.guess import LABELS

SEEN_IMAGES = 50
LARGEST = 224
"""Height and width in pixels that most image checkpoints accept."""
USUAL = (*LABELS, "y")


def guessed_parameters(
    kind: str, path: Path, label: str | None = None
) -> dict[str, Any]:
    """Guess for `arrays` or `images`; `label`: the column of a table with labels."""
    if kind == "images":
        return {"images": {"path": str(path), **_size_and_channels(path)}}
    labels = {"split": {"label_column": label}} if label else {}
    return {"arrays": {"path": str(path)}, **labels}


def holds_numbers(path: Path, label: str | None = None) -> bool:
    """Return True if a table, or the first one of a folder, has numbers in all columns
    except the label."""
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
    """Lists of whole numbers are tokens or keys more often than samples: False."""
    inner = getattr(kind, "value_type", None)
    if inner is not None:
        return bool(pa.types.is_floating(inner))
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def _size_and_channels(path: Path) -> dict[str, int]:
    """Measure the first images; empty for a manifest, whose images are elsewhere."""
    files = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in IMAGES)
    seen = [found for f in islice(files, SEEN_IMAGES) if (found := _opened(f))]
    if not seen:
        return {}
    sizes, modes = zip(*seen, strict=True)
    channels = 1 if set(modes) <= {"1", "L", "I;16"} else 3
    return {"size": min(LARGEST, median_low(sizes)), "channels": channels}


def _opened(file: Path) -> tuple[int, str] | None:
    """Return the shorter side in pixels and the mode; None if it is not an image."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return min(image.size), image.mode
    except OSError:
        return None
