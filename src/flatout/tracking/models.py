"""Log a run's model to MLflow, and select the champion of a registered model."""

from __future__ import annotations

import logging
import math
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from flatout.engine.sweep.statistics import paired_difference
from flatout.tracking.logged_models import log_sample_model, log_text_model
from flatout.tracking.record import SavedModel, newest_ns

logger = logging.getLogger(__name__)

CHAMPION = "champion"
LOGGED = "models:/"
MORE_SEEDS = (
    ": that may be noise, train both settings with the same 3 values of runtime.seed"
)
LOST = "lost"
"""Value returned instead of a URI if another run has replaced the model's files."""


def log_and_register(
    client: MlflowClient, described: dict[str, Any], run_id: str
) -> str:
    """Log a saved model to the run and register it if a name is configured. Steps that
    were completed earlier are skipped. `described` are the fields of a SavedModel.
    Return the model's URI, or LOST if another run has replaced the model's files."""
    found, folder = SavedModel.of(described), Path(described["folder"])
    logged = _logged(client, run_id)
    if logged:
        uri = f"{LOGGED}{logged[-1]}"
    elif newest_ns(folder) != found.saved_ns:
        told = "%s now has the model of another run: this run's model was not logged"
        logger.warning(told, folder)
        return LOST
    elif found.task is None:
        uri = log_sample_model(found, run_id)
    else:
        uri = log_text_model(folder, found.task, run_id)
    if found.registered_model:
        register(client, uri, found)
    return uri


def _logged(client: MlflowClient, run_id: str) -> list[str]:
    """Return the ids of the run's completely logged models. Incomplete models of killed
    processes are left out. Also make the run's experiment the active one, because
    MLflow logs models to the active experiment."""
    import mlflow

    run = client.get_run(run_id)
    mlflow.set_experiment(experiment_id=run.info.experiment_id)
    made = run.outputs.model_outputs if run.outputs else []
    models = [client.get_logged_model(one.model_id) for one in made]
    return [one.model_id for one in models if one.status == "READY"]


def register(client: MlflowClient, uri: str, found: SavedModel) -> None:
    """Register the logged model at `uri` as a version of the registered model, unless
    this has been done already. The alias `champion` is given to the best version
    trained on the same tokens. The first setting remains the best until another setting
    has a significantly lower validation loss for the same seeds."""
    import mlflow

    name = str(found.registered_model)
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)
    found_there = client.search_model_versions(f"name = '{name}'")
    versions = sorted(found_there, key=lambda one: int(one.version))
    made = next((one for one in versions if one.source == uri), None)
    if made is None:
        with redirect_stderr(StringIO()):  # MLflow prints a message about the version
            made = mlflow.register_model(uri, name, tags=found.tags)
        versions = [*versions, made]
    alike = [one for one in versions if one.tags.get("token_key") == found.token_key]
    best = _champion(alike)
    client.set_registered_model_alias(name, CHAMPION, best.version)
    is_noise = best.version != made.version and _loss(made) < _loss(best)
    logger.info(
        "version %s of the model %s: validation loss %.4f; the champion on this data "
        "is version %s, %.4f%s",
        *(made.version, name, _loss(made), best.version, _loss(best)),
        MORE_SEEDS if is_noise else "",
    )


def _loss(version: Any) -> float:
    try:
        loss = float(version.tags["validation_loss"])
    except (KeyError, ValueError):
        return math.inf
    return math.inf if math.isnan(loss) else loss


def _champion(versions: list[Any]) -> Any:
    """Return the best of the model versions, which are given in ascending order and
    were trained on the same tokens."""
    settings: dict[Any, list[Any]] = {}
    for one in versions:
        settings.setdefault(one.tags.get("setting"), []).append(one)
    best, *others = settings.values()
    pairs = math.comb(len(settings), 2)
    for other in others:
        if _is_better(other, best, pairs):
            best = other
    return min(best, key=_loss)  # the first one if they are equal


def _is_better(versions: list[Any], best: list[Any], pairs: int) -> bool:
    new, old = (
        {one.tags.get("seed"): _loss(one) for one in group if _loss(one) < math.inf}
        for group in (versions, best)
    )
    seeds = sorted(new.keys() & old.keys(), key=str)
    if len(seeds) < 2:
        return bool(new) and not old
    figures = ([group[seed] for seed in seeds] for group in (new, old))
    return bool(paired_difference(*figures, comparisons=pairs).high < 0)
