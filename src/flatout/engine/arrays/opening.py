"""Opens raw samples according to the parameters."""

from __future__ import annotations

from pathlib import Path

from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.parameters import ArraySettings, ImageSettings


def open_source(
    path: Path,
    label: str | None,
    own: ArraySettings | ImageSettings,
    *,
    is_labelled: bool = True,
) -> ArraySource:
    """Open a file or a folder. `label`: column of the labels, which are required if
    `is_labelled`, else optional."""
    if isinstance(own, ArraySettings):
        return ArrayFiles(path, tuple(own.inputs), label, is_labelled)
    from flatout.engine.arrays.image_files import ImageFiles
    from flatout.engine.rows.decoding import Decoder

    decoder, keeps_files = Decoder(own.size, own.channels), own.keep == "files"
    label = label if is_labelled else None
    return ImageFiles(path, label, own.image_column, decoder, is_labelled, keeps_files)
