"""conf/base/mlflow.yml, checked: kedro-mlflow's own classes import MLflow, a second or
two before a run has begun."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from kedro.framework.context import KedroContext
from pydantic import BaseModel, ConfigDict, StrictBool

from flatout.tracking.process.connect import Connect


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class HeaderOptions(_Options):
    type: str | None = None
    pass_context: bool = False
    init_kwargs: dict[str, str] = {}


class ServerOptions(_Options):
    mlflow_tracking_uri: str | None = None
    mlflow_registry_uri: str | None = None
    credentials: str | None = None
    request_header_provider: HeaderOptions = HeaderOptions()


class DisableOptions(_Options):
    pipelines: list[str] = []
    disable_autologging: bool = True


class NewExperimentOptions(_Options):
    artifact_location: str | None = None
    tags: dict[str, Any] | None = None


class ExperimentOptions(_Options):
    name: str = "Default"
    create_experiment_kwargs: NewExperimentOptions = NewExperimentOptions()
    restore_if_deleted: StrictBool = True


class RunOptions(_Options):
    id: str | None = None
    name: str | None = None
    nested: StrictBool = True


class DictOptions(_Options):
    flatten: StrictBool = False
    recursive: StrictBool = True
    sep: str = "."


class ParamsOptions(_Options):
    dict_params: DictOptions = DictOptions()
    long_params_strategy: Literal["fail", "truncate", "tag"] = "fail"


class TrackingOptions(_Options):
    disable_tracking: DisableOptions = DisableOptions()
    experiment: ExperimentOptions = ExperimentOptions()
    run: RunOptions = RunOptions()
    params: ParamsOptions = ParamsOptions()


class UiOptions(_Options):
    port: str = "5000"
    host: str = "127.0.0.1"


class MlflowOptions(_Options):
    """As `kedro_mlflow.config.kedro_mlflow_config.KedroMlflowConfig`, key for key."""

    server: ServerOptions = ServerOptions()
    tracking: TrackingOptions = TrackingOptions()
    ui: UiOptions = UiOptions()

    def tracks(self, pipelines: Collection[str]) -> bool:
        """Whether any of them opens a run."""
        return not set(pipelines) <= set(self.tracking.disable_tracking.pipelines)

    def connect(self, context: KedroContext) -> Connect:
        """How a run reaches the store."""
        name = self.server.credentials
        known = context._get_config_credentials() if name else {}
        provides = self.server.request_header_provider.type is not None
        return Connect(
            self.model_dump(),
            str(context.project_path),
            {name: known[name]} if name in known else {},
            context if provides else None,
        )
