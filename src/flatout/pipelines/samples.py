"""The pipelines of arrays and images, which differ only in their entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.engine.parameters import Settings
from flatout.pipelines import SPLITS, parameters


def encode_samples(raw: Path, **groups: Any) -> dict[str, Any]:
    """Check the samples of `raw`, a file or a folder, and assign them to train,
    validation and test. `groups`: parameters by group. Returns recipes: the catalog's
    datasets compare keys and carry one out only if the stored result was made from
    other inputs."""
    from flatout.engine.arrays.recipes import array_recipes

    settings = Settings(**groups)
    own = settings.images if "images" in groups else settings.arrays
    return array_recipes(raw, settings.split, own, settings.model)


def create(kind: str, **_: Any) -> Pipeline:
    """Return the pipeline. `kind`: arrays or images."""
    inputs = {"raw": f"raw_{kind}", **parameters("split", kind, "model")}
    # The quarantine is saved first: it exists if the run stops.
    outputs = {
        "rejected": f"rejected_{kind}",
        **{split: f"{split}_{kind}" for split in SPLITS},
        "label_names": "label_names",
        "report": f"{kind.removesuffix('s')}_report",
    }
    return Pipeline([Node(encode_samples, inputs, outputs, name=f"encode_{kind}")])
