"""Default locations of the project's files."""

from __future__ import annotations

from pathlib import Path

from kedro.utils import find_kedro_project

from flatout.engine.machine.environment import tracking_uri
from flatout.engine.parameters import SettingsError

SERVERS = ("http", "https", "databricks", "databricks-uc")
"""URI schemes of tracking servers, which store artifacts themselves."""

_roots: list[Path] = []


def use_project(folder: str | Path | None) -> None:
    """Resolve relative paths against `folder`, the project of the new session. If it is
    None, the project that contains the working directory is used."""
    _roots[:] = [Path(folder).expanduser().resolve()] if folder else []


def project_path(path: str = ".") -> str:
    """Return `path` as an absolute path. Relative paths are resolved against the
    project root.

    A packaged project has no root and uses the working directory instead.
    """
    root = _roots[0] if _roots else find_kedro_project(Path.cwd()) or Path.cwd()
    return str(root / path)


def tracking_store(data_dir: str) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, or else the URI of a SQLite file in
    `data_dir`."""
    return tracking_uri() or f"sqlite:///{project_path(data_dir)}/mlflow.db"


def artifact_folder(data_dir: str) -> str | None:
    """Return the artifact folder under `data_dir`, or None if a server stores the
    artifacts. By default, MLflow would write them to the working directory."""
    scheme = (tracking_uri() or "").partition(":")[0]
    return None if scheme in SERVERS else f"{project_path(data_dir)}/mlartifacts"


def check_store(store: str, artifacts: str | None) -> None:
    """Raise SettingsError if MLflow would misinterpret characters in the URI `store` or
    in the artifact location `artifacts`."""
    for place in (store, artifacts or ""):
        is_here = place.startswith(("sqlite:", "/"))
        if is_here and ("%" in place or "?" in place):
            raise SettingsError(
                f"{place}: MLflow reads % and ? in the name of a folder as parts of an "
                "address: keep the data elsewhere (--params=data_dir=/another/folder)"
            )
