"""What is told of a training, and to whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flatout.engine.parameters.common import SettingsModel


class TrackingSettings(SettingsModel):
    """What MLflow gets beside parameters, metrics and reports."""

    log_model: bool = True
    """The best model, loadable with `mlflow.pyfunc`."""
    system_metrics: bool = True
    """Load of cores, memory, disk, network and GPUs, every 10 s, under `system/`."""
    registered_model: str | None = "flatout"
    """Name in the model registry; the best by validation on the latest data has the
    alias champion."""


class GuardSettings(SettingsModel):
    """Holds a training's speed against that of the best earlier run of the same work
    on the same device."""

    enabled: bool = True
    """Compare each training with the fastest earlier one of the same work."""
    baseline: str | None = None
    """Id of a run in data/08_reporting/runs.jsonl. null: the fastest of the same work
    on the same device."""
    healthy_low_pct: float = Field(80, gt=0, le=100)
    """Of the baseline's samples/s; below is slow."""
    healthy_high_pct: float = Field(120, ge=100)
    """Of the baseline's samples/s; above is a new baseline."""
    on_slow: Literal["warn", "fail"] = "warn"
    """`fail`: the command ends with an error once all results are saved."""
    max_differences: int = Field(5, ge=1)
    """Shown in the log; all of them are in guard.json."""
