"""Raw samples as parameters say."""

from __future__ import annotations

from pathlib import Path

from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.parameters import Settings


def open_source(
    kind: str, path: Path, settings: Settings, *, is_told: bool = True
) -> ArraySource:
    """Of a file or a folder. `kind`: as `train.rows` names it. `is_told`: whether there
    must be labels."""
    if kind == "images":
        from flatout.engine.arrays.image_files import ImageFiles

        return ImageFiles.of(path, settings.split, settings.images, is_told=is_told)
    return ArrayFiles.of(path, settings.split, settings.arrays, is_told=is_told)
