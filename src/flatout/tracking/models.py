"""The best model of a run in MLflow, and the champion among the registered ones."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from kedro.io import DatasetError
from mlflow import MlflowClient
from mlflow.models import infer_signature
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from flatout.engine.tasks import Task, task_class
from flatout.tracking.store import one_line

logger = logging.getLogger(__name__)

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
CHAMPION = "champion"
VERDICT = "verdict"
LOGGED = "models:/"
OUR_TAGS = ("validation_loss", "token_key")


def log_with_example(parts: tuple[Any, ...], rows: Any, task: str) -> str:
    """Log a model, `parts` of it with its tokenizer where it has one, and the first of
    `rows` (`datasets.Dataset`) as example. Returns the model's URI."""
    model, *beside = parts
    if not beside:
        from flatout.engine.rows.opening import rows_from_dataset
        from flatout.tracking.sample_model import log_sample_model

        example = rows_from_dataset(rows).views(np.zeros(1, np.int64))[0]
        return log_sample_model(model, example)
    (tokenizer,) = beside
    text = tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True)
    return log_model(model, tokenizer, task_class(task), text[:200])


def log_model(model: Any, tokenizer: Any, task: type[Task], example: str) -> str:
    """Log to the active run, with signature, input example and pinned requirements.

    Returns the model's URI, for `mlflow.pyfunc.load_model`.
    """
    import mlflow.transformers

    # They ask for a model card, which a model of one's own does not have yet.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    example = task.example(tokenizer, example)
    loads = _loads_alone(model)
    logged = mlflow.transformers.log_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        name="model",
        task=task.pipeline_tag,
        signature=infer_signature([example], _output(task.pipeline_tag, example)),
        # MLflow tries what it is given on the model, which it would have to load.
        input_example=[example] if loads else None,
        # Left to itself MLflow imports what is not installed to find these.
        pip_requirements=[f"{name}=={version(name)}" for name in REQUIRED],
    )
    if not loads:
        logger.info(
            "MLflow has the files of the model, and cannot load %s, which transformers "
            "does not have: the catalog's entry model does",
            type(model).__name__,
        )
    return str(logged.model_uri)


def _loads_alone(model: Any) -> bool:
    """Whether transformers, or code that the model's config names, has its class."""
    import transformers

    named = hasattr(transformers, type(model).__name__)
    return named or bool(getattr(model.config, "auto_map", None))


def _output(pipeline_tag: str, example: str) -> Any:
    if pipeline_tag == "text-classification":
        return pd.DataFrame({"label": ["name"], "score": [0.5]})
    return [example]


def is_there(model_uri: str, name: str | None) -> bool:
    """Whether the store has the logged model, and a version of `name` of it; yes where
    it does not say."""
    client = MlflowClient()
    try:
        client.get_logged_model(model_uri.removeprefix(LOGGED))
        if name is None:
            return True
        found = client.search_model_versions(f"name = '{name}'")
        return any(version.source == model_uri for version in found)
    except Exception as error:  # tracking never ends a run
        return getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST"


@dataclass(frozen=True)
class Trained:
    """By what versions of a model are compared."""

    validation_loss: float
    token_key: str
    """Versions compete where they were trained and validated on the same tokens."""

    @property
    def tags(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def register(model_uri: str, name: str, trained: Trained, keep: int | None) -> str:
    """Make a version of the registered model `name`; the URI of the champion.

    `champion` is the best version by validation loss on these tokens, which are the
    latest; `champion-<key>` stays with the best on tokens of that key. `keep`: see
    `TrackingSettings.keep_models`.
    """
    client = MlflowClient()
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)
    made = mlflow.register_model(model_uri, name, tags=trained.tags)
    versions = _versions(client, name)
    rivals = [
        found
        for found in versions
        if found.tags["token_key"] == trained.token_key
        and str(found.version) != str(made.version)
    ]
    best = min([*rivals, made], key=_loss)  # of equals the first
    for alias in (CHAMPION, _alias(trained.token_key)):
        client.set_registered_model_alias(name, alias, best.version)
    _name_others(client, name, versions)
    verdict = _verdict(made, best, rivals)
    client.set_model_version_tag(name, made.version, VERDICT, verdict)
    logger.info("version %s of the model %s: %s", made.version, name, verdict)
    if keep is not None:
        _delete_old(client, name, keep)
    return f"models:/{name}/{best.version}"


def _alias(token_key: str) -> str:
    return f"{CHAMPION}-{token_key[:8]}"


def _name_others(client: MlflowClient, name: str, versions: list[Any]) -> None:
    """An alias for the best on tokens whose champion has none."""
    named = client.get_registered_model(name).aliases
    best: dict[str, Any] = {}
    for found in sorted(versions, key=_loss, reverse=True):
        best[_alias(found.tags["token_key"])] = found
    for alias in {*best} - {*named}:
        client.set_registered_model_alias(name, alias, best[alias].version)


def warn_where_worse(
    catalog: Any, report: dict[str, Any], champion: str | None
) -> None:
    """Say that the catalog's model is about to be overwritten with a worse one."""
    loss, before = report["validation_loss"], _report_of(catalog)
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


def _report_of(catalog: Any) -> dict[str, Any]:
    """Of the model that the catalog has; empty without one."""
    try:
        known = catalog.exists("model") and catalog.exists("train_report")
        report: dict[str, Any] = catalog.get("train_report").load() if known else {}
    except DatasetError:
        return {}
    return report


def _versions(client: MlflowClient, name: str) -> list[Any]:
    """Those that `register` made, the oldest first."""
    found = client.search_model_versions(f"name = '{name}'")
    ours = [one for one in found if {*OUR_TAGS} <= {*one.tags}]
    return sorted(ours, key=lambda one: int(one.version))


def _loss(version: Any) -> float:
    loss = float(version.tags["validation_loss"])
    return math.inf if math.isnan(loss) else loss


def _verdict(made: Any, best: Any, rivals: list[Any]) -> str:
    if not rivals:
        return "champion, the first on this data"
    if best.version == made.version:
        second = min(rivals, key=_loss)
        return (
            f"champion on this data, validation loss {_loss(made):.4f}; before it "
            f"version {second.version}, {_loss(second):.4f}"
        )
    return (
        f"version {best.version} stays the champion on this data, validation loss "
        f"{_loss(best):.4f} against {_loss(made):.4f}"
    )


def _delete_old(client: MlflowClient, name: str, keep: int) -> None:
    """Models of all versions but the newest `keep` and those that somebody named, in a
    store of this project alone: others have a server's models too."""
    stores = (client.tracking_uri, mlflow.get_registry_uri())
    if not all(uri.startswith("sqlite:") for uri in stores):
        return
    named = {*map(str, client.get_registered_model(name).aliases.values())}
    every = mlflow.search_model_versions()
    old = [
        found
        for found in _versions(client, name)[:-keep]
        if str(found.version) not in named
        and _is_as_registered(found)
        and not any(_points_at(other, found) for other in every)
    ]
    deleted = [found.version for found in old if _delete(client, name, found)]
    if deleted:
        logger.info(
            "deleted from MLflow: version %s of the model %s (tracking.keep_models: %d;"
            " versions with an alias, a description or a tag of yours stay, and those "
            "that another version points at)",
            ", ".join(map(str, deleted)),
            name,
            keep,
        )


def _is_as_registered(found: Any) -> bool:
    """`register` wrote it, and nobody wrote anything to it since."""
    ours = {*found.tags} == {*OUR_TAGS, VERDICT} and not found.description
    return ours and found.source.startswith(LOGGED)


def _points_at(other: Any, found: Any) -> bool:
    """Whether a version, of any name, needs the files of the version `found`."""
    if (other.name, str(other.version)) == (found.name, str(found.version)):
        return False
    source = other.source or ""
    model_id = found.source.removeprefix(LOGGED)
    return model_id in source or source == f"{LOGGED}{found.name}/{found.version}"


def _delete(client: MlflowClient, name: str, found: Any) -> bool:
    """The model's files, then the version that names it: what fails is found again."""
    try:
        model = client.get_logged_model(found.source.removeprefix(LOGGED))
        get_artifact_repository(model.artifact_location).delete_artifacts()
        client.delete_model_version(name, found.version)
        client.delete_logged_model(model.model_id)
    except Exception as error:  # tracking never ends a run
        logger.warning(
            "version %s of the model %s could not be deleted whole: %s",
            found.version,
            name,
            one_line(error),
        )
        return False
    return True
