"""Where the project keeps things, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path

from kedro.utils import find_kedro_project

from flatout.engine.machine.environment import tracking_uri
from flatout.engine.parameters import SettingsError

SERVERS = ("http", "https", "databricks", "databricks-uc")
"""Schemes of tracking stores that keep artifacts themselves."""

_roots: list[Path] = []


def use_project(folder: str | Path | None) -> None:
    """Let relative paths start at `folder`, the project of the session that begins.
    None: at the project that the working directory belongs to."""
    _roots[:] = [Path(folder).expanduser().resolve()] if folder else []


def project_path(path: str = ".") -> str:
    """Absolute form of `path`; relative ones start at the project's root.

    The packaged project has no root: there it is the working directory.
    """
    root = _roots[0] if _roots else find_kedro_project(Path.cwd()) or Path.cwd()
    return str(root / path)


def tracking_store(data_dir: str) -> str:
    """MLFLOW_TRACKING_URI, where set; else a file of SQLite in `data_dir`."""
    return tracking_uri() or f"sqlite:///{project_path(data_dir)}/mlflow.db"


def artifact_folder(data_dir: str) -> str | None:
    """Folder under `data_dir`; null where a server says where artifacts go. Without
    it a database or a folder as the store would put them where the run was started."""
    scheme = (tracking_uri() or "").partition(":")[0]
    return None if scheme in SERVERS else f"{project_path(data_dir)}/mlartifacts"


def check_store(store: str, artifacts: str | None) -> None:
    """Raises SettingsError for folders that MLflow would take for others."""
    for place in (store, artifacts or ""):
        is_here = place.startswith(("sqlite:", "/"))
        if is_here and ("%" in place or "?" in place):
            raise SettingsError(
                f"{place}: MLflow reads % and ? in the name of a folder as parts of an "
                "address: keep the data elsewhere (--params=data_dir=/another/folder)"
            )
