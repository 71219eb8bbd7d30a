"""Node of the images pipeline. It returns recipes: the catalog's datasets compare keys
and carry one out only where the stored result was made from something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.parameters import ImageSettings, ModelSettings, SplitSettings


def encode_images(
    raw_images: Path, split: SplitSettings, images: ImageSettings, model: ModelSettings
) -> dict[str, Any]:
    """Decode the images of `raw_images`, a folder or a manifest, and deal them to
    train, validation and test."""
    from flatout.engine.arrays.image_files import ImageFiles
    from flatout.engine.arrays.recipes import array_recipes

    source = ImageFiles.of(raw_images, split, images)
    return array_recipes("images", source, split, model)
