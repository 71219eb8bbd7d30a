"""Where the project keeps things, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path

from kedro.utils import find_kedro_project

from flatout.engine.machine.environment import tracking_uri

SERVERS = ("http", "https", "databricks", "databricks-uc")
"""Schemes of tracking stores that keep artifacts themselves."""


def project_path(path: str = ".") -> str:
    """Absolute form of `path`; relative ones start at the project's root.

    The packaged project has no root: there it is the working directory.
    """
    return str((find_kedro_project(Path.cwd()) or Path.cwd()) / path)


def tracking_store(data_dir: str) -> str:
    """MLFLOW_TRACKING_URI, where set; else a file of SQLite in `data_dir`."""
    return tracking_uri() or f"sqlite:///{project_path(data_dir)}/mlflow.db"


def artifact_folder(data_dir: str) -> str | None:
    """Folder under `data_dir`; null where a server says where artifacts go. Without
    it a database or a folder as the store would put them where the run was started."""
    scheme = (tracking_uri() or "").partition(":")[0]
    return None if scheme in SERVERS else f"{project_path(data_dir)}/mlartifacts"
