"""Describe a trained model for MLflow, and write its model card."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import xxhash

from flatout.datasets import TransformersModel
from flatout.engine.parameters import Settings, in_role, is_in
from flatout.engine.parameters.common import EXECUTION, by_path
from flatout.engine.rows import row_kind
from flatout.tracking.record import SavedModel, newest_ns

logger = logging.getLogger(__name__)


def saved_model(
    entry: Any,
    data: Any,
    spare: Path,
    settings: Settings,
    rows: Any,
    report: dict[str, Any],
) -> SavedModel:
    """Return a description of the model that was saved by the catalog entry `entry`.
    `data` is the model, or a tuple that begins with it. If the entry is not a
    TransformersModel, the model is also saved in the folder `spare`/model. For arrays
    and images, the first sample of `rows` (a `datasets.Dataset`) becomes the input
    example. `report` is the train report."""
    parts = data if isinstance(data, tuple) else (data,)
    if isinstance(entry, TransformersModel):
        folder = entry.path.absolute()
    else:
        folder = spare / "model"
        for part in parts:
            part.save_pretrained(folder)
    is_text = row_kind(settings.train.rows).kind == "tokens"
    return SavedModel(
        folder=str(folder),
        saved_ns=newest_ns(folder),
        example=None if is_text else _sample_file(rows, spare),
        task=_pipeline_tag(parts[0], settings) if is_text else None,
        registered_model=settings.tracking.registered_model,
        validation_loss=report["validation_loss"],
        token_key=report["token_key"],
        setting=_setting(settings),
        seed=settings.runtime.seed,
    )


def write_own_card(entry: Any, name: str, settings: Settings) -> None:
    """Write a model card with the title `name` if the model of the catalog entry
    `entry` was trained by flatout. If the folder is not writable, only a warning is
    logged."""
    from flatout.engine.export.hub import write_card
    from flatout.engine.models.building import ModelError

    if isinstance(entry, TransformersModel):
        reporting = Path(settings.paths.metrics).parent
        try:
            write_card(entry.path, name, reporting, ["kedro", *sys.argv[1:]])
        except ModelError:  # another tool's model gets no card
            return
        except OSError as error:  # a shared or read-only folder
            logger.warning("%s has no model card: %s", entry.path, error)


def _setting(settings: Settings) -> str:
    groups = settings.model_dump(mode="json", include={"runtime", "model", "train"})
    decides = {n: v for n, v in by_path(groups) if not is_in(n, in_role(EXECUTION))}
    decides.pop("runtime.seed", None)
    return xxhash.xxh3_64_hexdigest(json.dumps(decides, sort_keys=True).encode())


def _pipeline_tag(model: Any, settings: Settings) -> str:
    """Return the name of the transformers pipeline for this task."""
    import transformers

    from flatout.engine.tasks import task_class

    name = type(model).__name__
    if not hasattr(transformers, name) and not getattr(model.config, "auto_map", None):
        logger.info(
            "MLflow stores the model but cannot load %s, which is not part of "
            "transformers: load it with the catalog entry model instead",
            name,
        )
    return task_class(settings.model.task).pipeline_tag


def _sample_file(rows: Any, folder: Path) -> str:
    import numpy as np

    from flatout.engine.rows.rows import rows_from_dataset

    views = rows_from_dataset(rows).views(np.zeros(1, np.int64))
    np.save(folder / "example.npy", np.array(views[0]))
    return str(folder / "example.npy")
