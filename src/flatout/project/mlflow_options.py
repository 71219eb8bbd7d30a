"""conf/base/mlflow.yml, checked: where runs are recorded, and which."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from kedro.config import MissingConfigException
from kedro.framework.context import KedroContext
from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.engine.parameters import SettingsError
from flatout.places import check_store, project_path, tracking_store
from flatout.project.config_loader import loader_of

SQLITE = "sqlite:///"


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ServerOptions(_Options):
    mlflow_tracking_uri: str | None = None
    mlflow_registry_uri: str | None = None
    credentials: str | None = None


class DisableOptions(_Options):
    pipelines: list[str] = []


class NewExperimentOptions(_Options):
    artifact_location: str | None = None


class ExperimentOptions(_Options):
    name: str = "flatout"
    create_experiment_kwargs: NewExperimentOptions = NewExperimentOptions()


class RunOptions(_Options):
    id: str | None = None
    name: str | None = None


class TrackingOptions(_Options):
    disable_tracking: DisableOptions = DisableOptions()
    experiment: ExperimentOptions = ExperimentOptions()
    run: RunOptions = RunOptions()


class UiOptions(_Options):
    port: str = "5000"
    host: str = "127.0.0.1"


class MlflowOptions(_Options):
    server: ServerOptions = ServerOptions()
    tracking: TrackingOptions = TrackingOptions()
    ui: UiOptions = UiOptions()

    @property
    def store(self) -> str:
        """URI of the tracking store."""
        return str(self.server.mlflow_tracking_uri)

    @property
    def artifact_location(self) -> str | None:
        return self.tracking.experiment.create_experiment_kwargs.artifact_location

    def tracks(self, pipelines: Collection[str] | None) -> bool:
        """Whether any of the pipelines that a run names opens a run of MLflow."""
        asked = set(pipelines or ["__default__"])
        return not asked <= set(self.tracking.disable_tracking.pipelines)

    def store_files(self, data_dir: str) -> list[Path]:
        """The store, if it is the file of the data folder. Any other may be away: its
        points wait in a file."""
        file = Path(project_path(data_dir), "mlflow.db")
        return [file] if self.store == f"{SQLITE}{file}" else []

    def check(self) -> None:
        """Raises SettingsError for folders that MLflow would take for others."""
        check_store(self.store, self.artifact_location)


def mlflow_options(context: KedroContext) -> MlflowOptions:
    """Of a session; relative paths start at the project. Raises SettingsError."""
    try:
        found = MlflowOptions.model_validate(context.config_loader["mlflow"])
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise SettingsError(f"mlflow.yml in conf/: {'; '.join(faults)}") from None
    server, at = found.server, found.tracking.experiment.create_experiment_kwargs
    data_dir = loader_of(context).settings.data_dir
    uri = server.mlflow_tracking_uri or tracking_store(data_dir)
    if uri.startswith(SQLITE):
        uri = SQLITE + project_path(uri.removeprefix(SQLITE))
    server.mlflow_tracking_uri = uri
    if at.artifact_location and ":" not in at.artifact_location:
        at.artifact_location = project_path(at.artifact_location)
    return found


def login(context: KedroContext, options: MlflowOptions) -> dict[str, str]:
    """Variables of the environment that `server.credentials` names."""
    name = options.server.credentials
    if name is None:
        return {}
    try:
        known: dict[str, Any] = context.config_loader["credentials"]
    except MissingConfigException:
        known = {}
    return {key: str(value) for key, value in (known.get(name) or {}).items()}
