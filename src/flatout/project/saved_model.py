"""Describe a trained model for MLflow, and write its model card."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from flatout.datasets import TransformersModel
from flatout.engine.parameters import Settings, in_role, is_in
from flatout.engine.parameters.common import EXECUTION, by_path
from flatout.engine.rows import row_kind
from flatout.engine.rows.rows import rows_from_dataset
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
    TransformersModel, the model is also saved in the folder `spare`/model. `rows` is a
    `datasets.Dataset` of one split, and `report` is the train report."""
    parts = data if isinstance(data, tuple) else (data,)
    if isinstance(entry, TransformersModel):
        folder = entry.path.absolute()
    else:
        folder = spare / "model"
        for part in parts:
            part.save_pretrained(folder)
    is_text = row_kind(settings.train.rows).kind == "tokens"
    found = SavedModel(
        folder=str(folder),
        saved_ns=newest_ns(folder),
        task=_pipeline_tag(parts[0], settings) if is_text else None,
        registered_model=settings.tracking.registered_model,
        validation_loss=report["validation_loss"],
        token_key=report["token_key"],
        setting=_setting(settings),
        seed=settings.runtime.seed,
    )
    if is_text:
        return found
    sample = rows_from_dataset(rows).views(np.zeros(1, np.int64))[0]
    form = {"shape": list(sample.shape), "dtype": str(sample.dtype)}
    return replace(found, **form, outputs=_outputs(parts[0], settings))


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


def _outputs(model: Any, settings: Settings) -> dict[str, str]:
    """Return the columns of a prediction and their Arrow types."""
    from flatout.engine.predict.checks import label_names_of
    from flatout.engine.tasks import make_task

    task = make_task(settings.model, label_names_of(model.config), None)
    return {field.name: str(field.type) for field in task.answer_fields()}
