"""Parameters of the tracking and of the guard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flatout.engine.parameters.common import SettingsModel


class TrackingSettings(SettingsModel):
    """Data that MLflow records in addition to parameters, metrics and reports."""

    log_model: bool = True
    """Log the best model, loadable with `mlflow.pyfunc`."""
    system_metrics: bool = True
    """Log the load of cores, memory, disk, network, GPUs to `system/` every 10 s."""
    registered_model: str | None = "flatout"
    """Name in the model registry. On the latest data, the setting that no other beats
    beyond noise has the alias champion."""


class GuardSettings(SettingsModel):
    """Comparison of a training's speed with the best earlier run of the same work on
    the same device."""

    enabled: bool = True
    """Compare each training with the fastest earlier one of the same work."""
    baseline: str | None = None
    """Id of a run in data/08_reporting/runs.jsonl. null: the fastest of the same work
    on the same device."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    """Percent of the baseline's samples/s; a lower rate is slow."""
    healthy_high_pct: float = Field(120, ge=100)
    """Percent of the baseline's samples/s; a higher rate is a new baseline."""
    on_slow: Literal["warn", "fail"] = "warn"
    """Effect of a slow run. `fail`: an error after all results are saved."""
    max_differences: int = Field(5, ge=1)
    """Number of differences in the log; all of them are in guard.json."""
