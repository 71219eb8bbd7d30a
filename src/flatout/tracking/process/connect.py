"""The tracking store as mlflow.yml says: login, experiment, client."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flatout.engine.machine.environment import tracking_uri_kept

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Connect:
    """Logs in and makes the experiment, in whichever process it is called."""

    config: dict[str, Any]
    """Of mlflow.yml, whole."""
    project_path: str
    credentials: dict[str, Any] = field(default_factory=dict, repr=False)
    context: Any = None
    """Of Kedro: a provider of request headers may ask for it, in this process."""

    def __call__(self) -> MlflowClient:
        from mlflow import MlflowClient

        # Else it calls mlflow.autolog(disable=True), whose import hooks deadlock with a
        # main thread that imports transformers. Autologging is off anyhow.
        config = self._config()
        config.tracking.disable_tracking.disable_autologging = False
        with tracking_uri_kept():
            config.setup(self.context or self._stand_in())
        return MlflowClient()

    def export_credentials(self) -> None:
        """As the environment variables that MLflow reads."""
        self._config()._export_credentials(self._stand_in())

    def _config(self) -> Any:
        from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig

        return KedroMlflowConfig.model_validate(self.config)

    def _stand_in(self) -> Any:
        """What kedro-mlflow asks of Kedro's context."""
        return SimpleNamespace(
            project_path=Path(self.project_path),
            _get_config_credentials=lambda: self.credentials,
        )
