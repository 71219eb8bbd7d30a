"""Raw samples as parameters say."""

from __future__ import annotations

from pathlib import Path

from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.parameters import Settings


def open_source(kind: str, path: Path, settings: Settings) -> ArraySource:
    """Of a file or a folder. `kind`: as `train.rows` names it."""
    if kind == "images":
        from flatout.engine.arrays.image_files import ImageFiles

        return ImageFiles.of(path, settings.split, settings.images)
    return ArrayFiles.of(path, settings.split, settings.arrays)
