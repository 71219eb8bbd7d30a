"""Kedro's entry to the project: configuration loader, resolvers, hooks."""

from __future__ import annotations

from pathlib import Path

from kedro.utils import find_kedro_project

from flatout.benchmark_hooks import TunedHooks
from flatout.config_loader import ProjectConfigLoader
from flatout.engine.environment import tracking_uri
from flatout.guard_hooks import GuardHooks
from flatout.hooks import (
    EnvironmentHooks,
    HandOverHooks,
    ParameterHooks,
    TrackingHooks,
)
from flatout.quiet import silence_known_warnings
from flatout.sessions import session_class

silence_known_warnings()


def project_path(path: str = ".") -> str:
    """Absolute form of `path`; relative ones start at the project's root.

    The packaged project has no root: there it is the working directory.
    """
    return str((find_kedro_project(Path.cwd()) or Path.cwd()) / path)


def tracking_store(data_dir: str) -> str:
    """MLFLOW_TRACKING_URI, where set; else a file of SQLite in `data_dir`."""
    return tracking_uri() or f"sqlite:///{project_path(data_dir)}/mlflow.db"


def artifact_folder(data_dir: str) -> str | None:
    """Folder beside the SQLite file; null where a server says where artifacts go."""
    return None if tracking_uri() else f"{project_path(data_dir)}/mlartifacts"


CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    # Without it an environment's `train: {max_steps: 4}` would drop all else of train.
    "merge_strategy": {"parameters": "soft", "mlflow": "soft", "globals": "soft"},
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    "custom_resolvers": {
        "project_path": project_path,
        "tracking_store": tracking_store,
        "artifact_folder": artifact_folder,
    },
}

# Registered here, guarded and in order, in place of kedro-mlflow's own.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow",)

SESSION_CLASS = session_class()

TRACKING = TrackingHooks()

# Kedro calls them last to first.
HOOKS = (
    GuardHooks(TRACKING),
    TunedHooks(),
    HandOverHooks(),
    TRACKING,
    EnvironmentHooks(),
    ParameterHooks(),
)
