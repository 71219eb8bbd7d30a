"""The pipelines of arrays and images, which differ only in their entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.engine.parameters import (
    ArraySettings,
    ImageSettings,
    ModelSettings,
    SplitSettings,
)


def encode_arrays(
    raw: Path, split: SplitSettings, arrays: ArraySettings, model: ModelSettings
) -> dict[str, Any]:
    """Check the samples of `raw`, a file or a folder, and assign them to train,
    validation and test. Returns recipes: the catalog's datasets compare keys and carry
    one out only if the stored result was made from other inputs."""
    from flatout.engine.arrays.recipes import array_recipes

    return array_recipes(raw, split, arrays, model)


def encode_images(
    raw: Path, split: SplitSettings, images: ImageSettings, model: ModelSettings
) -> dict[str, Any]:
    """Process a folder of images or a manifest like `encode_arrays`."""
    from flatout.engine.arrays.recipes import array_recipes

    return array_recipes(raw, split, images, model)


def create(kind: str, **_: Any) -> Pipeline:
    """Return the pipeline. `kind`: arrays or images."""
    inputs = [f"raw_{kind}", "params:split", f"params:{kind}", "params:model"]
    # The quarantine is saved first: it exists if the run stops.
    outputs = {
        "rejected": f"rejected_{kind}",
        "train": f"train_{kind}",
        "validation": f"validation_{kind}",
        "test": f"test_{kind}",
        "label_names": "label_names",
        "report": f"{kind.removesuffix('s')}_report",
    }
    encode = {"arrays": encode_arrays, "images": encode_images}[kind]
    return Pipeline([Node(encode, inputs, outputs, name=f"encode_{kind}")])
