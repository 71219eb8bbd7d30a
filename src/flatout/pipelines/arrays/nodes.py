"""Node of the arrays pipeline. It returns recipes: the catalog's datasets compare keys
and carry one out only where the stored result was made from something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.parameters import ArraySettings, ModelSettings, SplitSettings


def encode_arrays(
    raw_arrays: Path, split: SplitSettings, arrays: ArraySettings, model: ModelSettings
) -> dict[str, Any]:
    """Check the samples of `raw_arrays`, a file or a folder, and deal them to train,
    validation and test."""
    from flatout.engine.arrays.array_files import ArrayFiles
    from flatout.engine.arrays.recipes import array_recipes

    source = ArrayFiles.of(raw_arrays, split, arrays)
    return array_recipes("arrays", source, split, model)
