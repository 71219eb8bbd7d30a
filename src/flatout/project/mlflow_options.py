"""The options in conf/base/mlflow.yml: the tracking store and which runs are
tracked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kedro.framework.context import KedroContext
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.common import by_path
from flatout.places import project_path, tracking_store
from flatout.project.config_loader import credentials_of, loader_of

SQLITE = "sqlite:///"


class MlflowOptions(BaseModel):
    """The options in mlflow.yml. A field's alias is the path in that file."""

    model_config = ConfigDict(extra="forbid")

    uri: str | None = Field(None, alias="server.mlflow_tracking_uri")
    credentials: str | None = Field(None, alias="server.credentials")
    untracked: list[str] = Field([], alias="tracking.disable_tracking.pipelines")
    experiment: str = Field("flatout", alias="tracking.experiment.name")
    artifact_location: str | None = Field(
        None, alias="tracking.experiment.create_experiment_kwargs.artifact_location"
    )

    @property
    def store(self) -> str:
        """URI of the tracking store."""
        return str(self.uri)

    def tracks(self, pipelines: Collection[str] | None) -> bool:
        """Return whether a run of these pipelines is recorded in MLflow."""
        return not set(pipelines or ["__default__"]) <= set(self.untracked)

    def store_files(self, data_dir: str) -> list[Path]:
        """Return a list with the store's file if the store is mlflow.db in the data
        folder, else an empty list. Other stores need not be reachable, because metrics
        stay in a file until they can be sent."""
        file = Path(project_path(data_dir), "mlflow.db")
        return [file] if self.store == f"{SQLITE}{file}" else []


def mlflow_options(context: KedroContext) -> MlflowOptions:
    """Read the options and resolve relative paths against the project root. Raises
    SettingsError if an option is invalid."""
    loader = loader_of(context)
    given = {path: value for path, value in by_path(loader["mlflow"]) if value != {}}
    try:
        found = MlflowOptions.model_validate(given)
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors()]
        raise SettingsError(f"mlflow.yml in conf/: {'; '.join(faults)}") from None
    uri = found.uri or tracking_store(loader.settings.data_dir)
    if uri.startswith(SQLITE):
        uri = SQLITE + project_path(uri.removeprefix(SQLITE))
    place = found.artifact_location
    if place and ":" not in place:
        place = project_path(place)
    return found.model_copy(update={"uri": uri, "artifact_location": place})


def login(context: KedroContext, options: MlflowOptions) -> dict[str, str]:
    """Return the environment variables with the credentials for the store, or an empty
    dict if `server.credentials` is not set."""
    found = credentials_of(context, options.credentials) if options.credentials else {}
    return {key: str(value) for key, value in found.items()}
