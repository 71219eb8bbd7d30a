"""Opens raw samples according to the parameters."""

from __future__ import annotations

from pathlib import Path

from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.parameters import (
    ArraySettings,
    ImageSettings,
    Settings,
    SplitSettings,
)


def open_source(
    kind: str, path: Path, settings: Settings, *, is_told: bool = True
) -> ArraySource:
    """Open a file or a folder. `kind`: the value of `train.rows`."""
    own = settings.images if kind == "images" else settings.arrays
    return source_of(path, settings.split, own, is_told=is_told)


def source_of(
    path: Path,
    split: SplitSettings,
    own: ArraySettings | ImageSettings,
    *,
    is_told: bool = True,
) -> ArraySource:
    """Open a file or a folder. `is_told`: labels are required."""
    label = split.label_column
    if isinstance(own, ArraySettings):
        return ArrayFiles(path, tuple(own.inputs), label, is_told)
    from flatout.engine.arrays.image_files import ImageFiles
    from flatout.engine.rows.decoding import Decoder

    decoder, files = Decoder(own.size, own.channels), own.keep == "files"
    return ImageFiles(
        path, label if is_told else None, own.image_column, decoder, is_told, files
    )
