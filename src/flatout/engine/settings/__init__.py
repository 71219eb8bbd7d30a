"""Every parameter of flatout, its type, its bounds and its unit.

One model per `conf/base/parameters_<name>.yml`. Unknown keys are refused; all
faults are reported at once, each with its path and the nearest valid name
(:func:`parse_settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from flatout.engine.settings.common import (
    CLASSIFIES,
    Auto,
    SettingsError,
    SettingsModel,
    Strategy,
    Task,
)
from flatout.engine.settings.data import (
    CorpusSettings,
    Fractions,
    PredictSettings,
    SplitSettings,
    TokenizeSettings,
)
from flatout.engine.settings.faults import fault_lines, near_or_all, refusal
from flatout.engine.settings.measuring import (
    BenchmarkSettings,
    SweepRange,
    SweepSettings,
    SweptValue,
)
from flatout.engine.settings.reporting import (
    GuardSettings,
    TrackingSettings,
)
from flatout.engine.settings.training import (
    CheckpointSettings,
    DistributedSettings,
    LoaderSettings,
    ModelSettings,
    PathSettings,
    RuntimeSettings,
    TrainSettings,
)

__all__ = [
    "Auto",
    "BenchmarkSettings",
    "CLASSIFIES",
    "CheckpointSettings",
    "CorpusSettings",
    "DistributedSettings",
    "Fractions",
    "GuardSettings",
    "LoaderSettings",
    "ModelSettings",
    "PathSettings",
    "PredictSettings",
    "RuntimeSettings",
    "Settings",
    "SettingsError",
    "SplitSettings",
    "Strategy",
    "SweepRange",
    "SweepSettings",
    "SweptValue",
    "Task",
    "TokenizeSettings",
    "TrackingSettings",
    "TrainSettings",
    "near_or_all",
    "parse_settings",
    "refusal",
]


class Settings(SettingsModel):
    """All parameters together, as `conf/*/parameters_*.yml` spell them."""

    data_dir: str | None = None
    """Read by the catalog; here so that `--params=data_dir=...` is no unknown key."""
    corpus: CorpusSettings = CorpusSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    model: ModelSettings = ModelSettings(config={"model_type": "bert"})
    split: SplitSettings = SplitSettings()
    tokenize: TokenizeSettings = TokenizeSettings()
    train: TrainSettings = TrainSettings()
    benchmark: BenchmarkSettings = BenchmarkSettings()
    predict: PredictSettings = PredictSettings()
    sweep: SweepSettings = SweepSettings()
    tuned: dict[str, Any] = {}
    """Where conf/tuned comes from; written by the benchmark, read by nothing else."""
    tracking: TrackingSettings = TrackingSettings()
    guard: GuardSettings = GuardSettings()
    paths: PathSettings = PathSettings()


def parse_settings(parameters: Mapping[str, Any]) -> Settings:
    """Check `parameters` whole. Raises SettingsError that names every fault."""
    try:
        return Settings.model_validate(dict(parameters))
    except ValidationError as error:
        raise refusal(fault_lines(error.errors(), Settings)) from None
