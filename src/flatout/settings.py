"""Kedro's entry to the project: configuration loader, resolvers, hooks."""

from __future__ import annotations

from flatout.benchmark_hooks import TunedHooks
from flatout.config_loader import ProjectConfigLoader
from flatout.engine.garbage import collect_rarely
from flatout.guard_hooks import GuardHooks
from flatout.hooks import (
    EnvironmentHooks,
    HandOverHooks,
    TrackingHooks,
)
from flatout.parameter_hooks import ParameterHooks
from flatout.places import artifact_folder, project_path, tracking_store
from flatout.quiet import silence_known_warnings
from flatout.sessions import session_class

silence_known_warnings()
collect_rarely()

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
