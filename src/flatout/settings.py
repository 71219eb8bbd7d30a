"""Kedro's entry to the project: configuration loader, resolvers, hooks."""

from __future__ import annotations

from flatout.engine.machine.garbage import collect_rarely
from flatout.places import artifact_folder, project_path, tracking_store
from flatout.project.catalog_hooks import (
    CatalogHooks,
    OutputHooks,
    TrustHooks,
)
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.data_lock import DataLockHooks
from flatout.project.data_origin import OriginHooks
from flatout.project.guard_hooks import GuardHooks
from flatout.project.hooks import EnvironmentHooks, HandOverHooks, TrackingHooks
from flatout.project.parameters.hooks import ParameterHooks, TunedHooks
from flatout.project.parameters.this_run import ThisRunHooks
from flatout.project.phases import PhaseHooks
from flatout.project.sessions import session_class
from flatout.project.summary_hooks import SummaryHooks
from flatout.project.terminal import set_up_terminal

set_up_terminal()
collect_rarely()

CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    # Without it an environment's `train: {max_steps: 4}` would drop all else of train.
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**", "**/mlflow*"]},
    "custom_resolvers": {
        "project_path": project_path,
        "tracking_store": tracking_store,
        "artifact_folder": artifact_folder,
    },
}

# In an environment that has it, kedro-mlflow would record each run once more.
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
    CatalogHooks(),
    TrustHooks(),
    OriginHooks(),
    OutputHooks(),
    ParameterHooks(),
    ThisRunHooks(),
    PhaseHooks(TRACKING),
    SummaryHooks(),
    DataLockHooks(),
)
