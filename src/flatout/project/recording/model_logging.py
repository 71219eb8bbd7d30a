"""A training's model on its way to MLflow, beside whatever the run does next."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedro.io import DataCatalog, DatasetError

from flatout import tracking
from flatout.datasets import TransformersModel
from flatout.tracking.models import (
    Registration,
    SampleFolder,
    TextModel,
    log_and_register,
)

logger = logging.getLogger(__name__)

JOIN_LIMIT_S = 600.0
EXAMPLE_LENGTH = 200


@dataclass(frozen=True)
class ToLog:
    """A model that is saved next, and what it is told by."""

    rows: Any
    """A `datasets.Dataset`: the first is the example."""
    task: str
    registration: Registration | None
    report: dict[str, Any]
    run_id: Callable[[], str | None]
    """Of the run, once the store has it."""
    before: dict[str, Any]
    """The catalog's report of the model before it."""
    done: Callable[[str], None]
    """Is told the model's URI."""


class ModelLogger:
    """One training's, in a thread where MLflow is in another process."""

    def __init__(self, forwarder: Any) -> None:
        self._forwarder = forwarder
        self._thread: threading.Thread | None = None

    def start(self, found: ToLog, catalog: DataCatalog, parts: tuple[Any, ...]) -> None:
        """The catalog has `parts`, a model and, where it has one, its tokenizer."""
        if not self._forwarder.is_apart:
            self._log(found, catalog, parts)
            return
        self._thread = threading.Thread(
            target=self._log, args=(found, catalog, parts), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _log(self, found: ToLog, catalog: DataCatalog, parts: tuple[Any, ...]) -> None:
        if not self._forwarder.flush():
            logger.warning("The model was not logged: MLflow takes nothing now.")
            warn_where_worse(found.before, found.report, None)
            return
        champion = None
        try:
            with tempfile.TemporaryDirectory() as spare:
                folder = _saved(catalog.get("model"), parts, Path(spare, "model"))
                model = described(parts, folder, found)
                uri, champion = self._forwarder.call(
                    log_and_register, model, found.registration, found.run_id()
                )
            found.done(uri)
        except Exception as error:  # tracking never ends a run
            logger.warning("The model was not logged: %s", tracking.one_line(error))
        warn_where_worse(found.before, found.report, champion)


def _saved(entry: Any, parts: tuple[Any, ...], spare: Path) -> Path:
    """The catalog's own folder; of an entry of another type a copy."""
    if isinstance(entry, TransformersModel):
        return Path(entry._describe()["filepath"]).absolute()
    for part in parts:
        part.save_pretrained(spare)
    return spare


def described(
    parts: tuple[Any, ...], folder: Path, found: ToLog
) -> TextModel | SampleFolder:
    """What MLflow is told of `parts`, which lie in `folder`."""
    import transformers

    model, *beside = parts
    if not beside:
        import numpy as np

        from flatout.engine.rows.opening import rows_from_dataset

        views = rows_from_dataset(found.rows).views(np.zeros(1, np.int64))
        return SampleFolder(folder, np.array(views[0]))
    from flatout.engine.tasks import task_class

    (tokenizer,), task = beside, task_class(found.task)
    ids = found.rows[0]["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)[:EXAMPLE_LENGTH]
    name = type(model).__name__
    loads = hasattr(transformers, name) or bool(getattr(model.config, "auto_map", None))
    if not loads:
        logger.info(
            "MLflow has the files of the model, and cannot load %s, which transformers "
            "does not have: the catalog's entry model does",
            name,
        )
    return TextModel(
        folder=folder,
        task=task.pipeline_tag,
        model_class=name,
        tokenizer_class=type(tokenizer).__name__,
        dtype=str(model.dtype),
        source=str(model.name_or_path),
        example=task.example(tokenizer, text),
        loads=loads,
    )


def warn_where_worse(
    before: dict[str, Any], report: dict[str, Any], champion: str | None
) -> None:
    """Say that the catalog's model was overwritten with a worse one."""
    loss = report["validation_loss"]
    if before.get("token_key") != report["token_key"]:
        return
    if not before["validation_loss"] < loss:
        return
    place = (
        f"The best on this data is {champion} in MLflow"
        if champion
        else "MLflow has no better one that is known (tracking.registered_model)"
    )
    logger.warning(
        "the model validates worse than the one before it on the same data (loss %.4f, "
        "before %.4f), and takes its place in the catalog. %s",
        loss,
        before["validation_loss"],
        place,
    )


def report_of(catalog: DataCatalog) -> dict[str, Any]:
    """Of the model that the catalog has; empty without one."""
    try:
        known = catalog.exists("model") and catalog.exists("train_report")
        report: dict[str, Any] = catalog.get("train_report").load() if known else {}
    except DatasetError:
        return {}
    return report
