"""The pipelines for arrays and images, which differ only in catalog entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.engine.parameters import Settings
from flatout.pipelines import SPLITS, parameters


def encode_samples(raw: Path, **groups: Any) -> dict[str, Any]:
    """Return recipes that check the samples in `raw`, a file or folder, and assign them
    to the three splits. A recipe is executed while its result is saved, unless the
    stored result is up to date. `groups` are the parameter groups."""
    from flatout.engine.arrays.recipes import array_recipes

    settings = Settings(**groups)
    own = settings.images if "images" in groups else settings.arrays
    return array_recipes(raw, settings.split, own, settings.model)


def create(kind: str, **_: Any) -> Pipeline:
    """Return the pipeline for samples of this `kind`: arrays or images."""
    inputs = {"raw": f"raw_{kind}", **parameters("split", kind, "model")}
    # Rejected rows are saved first, so that they exist even if the run fails later.
    outputs = {
        "rejected": f"rejected_{kind}",
        **{split: f"{split}_{kind}" for split in SPLITS},
        "label_names": "label_names",
        "report": f"{kind.removesuffix('s')}_report",
    }
    return Pipeline([Node(encode_samples, inputs, outputs, name=f"encode_{kind}")])
