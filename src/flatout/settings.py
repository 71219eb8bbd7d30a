"""Kedro's settings for this project: configuration loader, resolvers and hooks."""

from __future__ import annotations

from flatout.engine.machine.garbage import collect_rarely
from flatout.places import artifact_folder, project_path, tracking_store
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.hooks import in_order
from flatout.project.sessions import session_class
from flatout.project.terminal import print_lines

print_lines()
collect_rarely()

CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    # Otherwise `train: {max_steps: 4}` in an environment would drop the other train
    # keys.
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    "custom_resolvers": {
        "project_path": project_path,
        "tracking_store": tracking_store,
        "artifact_folder": artifact_folder,
    },
}

# If this plugin is installed, its hooks would record each run a second time.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow",)

SESSION_CLASS = session_class()

# Kedro calls hooks in reverse order of registration.
HOOKS = tuple(reversed(in_order()))
