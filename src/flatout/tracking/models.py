"""The best model of a run in MLflow, and the champion among the registered ones."""

from __future__ import annotations

import logging
import math
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.tracking.store import activate_run, one_line

if TYPE_CHECKING:  # a run's process may do without, and without its imports
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

CHAMPION = "champion"
VERDICT = "verdict"
LOGGED = "models:/"
OUR_TAGS = ("validation_loss", "token_key")


@dataclass(frozen=True)
class TextModel:
    """What MLflow is told of a model and its tokenizer in `folder`."""

    folder: Path
    """As `save_pretrained` of both leaves it."""
    task: str
    """The pipeline's tag."""
    model_class: str
    tokenizer_class: str
    dtype: str
    """As in `torch.float32`."""
    source: str
    """`name_or_path` of the model."""
    example: str
    loads: bool
    """Whether MLflow can load the model's class, to try the example."""


@dataclass(frozen=True)
class SampleFolder:
    """A model of samples of one shape, and one of them."""

    folder: Path
    example: Any
    """An array (...)."""


@dataclass(frozen=True)
class Registration:
    """As which registered model a version is made, and by what it is compared."""

    name: str
    trained: Trained
    keep: int | None


def log_and_register(
    found: TextModel | SampleFolder, wanted: Registration | None, run_id: str
) -> tuple[str, str | None]:
    """Log a saved model to the run, and make it a version where that is `wanted`.
    Returns the URIs of the model and of the champion."""
    activate_run(run_id)
    if isinstance(found, SampleFolder):
        from flatout.tracking.sample_model import log_sample_model

        uri = log_sample_model(found.folder, found.example)
    else:
        from flatout.tracking.process.text_model import log_text_model

        uri = log_text_model(found)
    if wanted is None:
        return uri, None
    return uri, register(uri, wanted.name, wanted.trained, wanted.keep)


def is_there(model_uri: str, name: str | None) -> bool:
    """Whether the store has the logged model, and a version of `name` of it; yes where
    it does not say."""
    from mlflow import MlflowClient

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
    import mlflow
    from mlflow import MlflowClient

    client = MlflowClient()
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)
    with redirect_stderr(StringIO()):  # two lines that ours below says again
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
    import mlflow

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
    from mlflow.store.artifact.artifact_repository_registry import (
        get_artifact_repository,
    )

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
