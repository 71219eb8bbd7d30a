"""What is told of a training, and to whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flatout.engine.settings.common import SettingsModel


class TrackingSettings(SettingsModel):
    """What MLflow gets beside parameters, metrics and reports."""

    log_model: bool = True
    """The best model, loadable with `mlflow.pyfunc`."""
    system_metrics: bool = True
    """Load of cores, memory, disk, network and GPUs, every 10 s, under `system/`."""
    registered_model: str | None = "flatout"
    """Name in the model registry; the best by validation gets the alias champion."""


class GuardSettings(SettingsModel):
    """Holds a training's speed against that of the best earlier run of the same work
    on the same device (guide C)."""

    enabled: bool = True
    baseline: str | None = None
    """Id of an MLflow run. null: the fastest of the same work on the same device."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    healthy_high_pct: float = Field(120, ge=100)
    on_slow: Literal["warn", "fail"] = "warn"
    """`fail`: the command ends with an error once all results are saved."""
    max_differences: int = Field(5, ge=1)
    """Shown in the log; all of them are in guard.json."""
    store_limit_s: float = Field(10, gt=0)
    """Longest wait for the tracking store's answer."""
