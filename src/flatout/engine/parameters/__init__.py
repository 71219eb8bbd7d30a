"""All parameters of flatout with their types, bounds and units.

Each parameter group has its own Pydantic model, which rejects unknown keys.
:func:`parse_settings` reports all errors together, each with its path and the closest
valid name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flatout.engine.parameters.common import (
    EXECUTION,
    UNTIMED,
    Auto as Auto,
    SettingsError as SettingsError,
    SettingsModel as SettingsModel,
    Strategy as Strategy,
    fields_of,
    parameter,
)
from flatout.engine.parameters.data import (
    ArraySettings as ArraySettings,
    CorpusSettings as CorpusSettings,
    DetectSettings as DetectSettings,
    EvaluateSettings as EvaluateSettings,
    ExportSettings as ExportSettings,
    Fractions as Fractions,
    ImageSettings as ImageSettings,
    MineSettings as MineSettings,
    PredictSettings as PredictSettings,
    SplitSettings as SplitSettings,
    TokenizeSettings as TokenizeSettings,
)
from flatout.engine.parameters.execution import (
    CheckpointSettings as CheckpointSettings,
    DistributedSettings as DistributedSettings,
    GuardSettings as GuardSettings,
    LoaderSettings as LoaderSettings,
    PathSettings as PathSettings,
    RuntimeSettings as RuntimeSettings,
    TrackingSettings as TrackingSettings,
)
from flatout.engine.parameters.faults import (
    fault_lines,
    is_misplaced,
    near_or_all as near_or_all,
    refusal as refusal,
)
from flatout.engine.parameters.lora import LoraSettings as LoraSettings
from flatout.engine.parameters.measuring import (
    BenchmarkSettings as BenchmarkSettings,
    SweepRange as SweepRange,
    SweepSettings as SweepSettings,
    SweptValue as SweptValue,
)
from flatout.engine.parameters.other_names import with_new_names
from flatout.engine.parameters.training import (
    ModelSettings as ModelSettings,
    TrainSettings as TrainSettings,
)


class Settings(SettingsModel):
    """All parameters, with the same names as in `conf/*/parameters*.yml`."""

    data_dir: str = parameter("data", EXECUTION)
    """Folder for all files that a run writes. The catalog's paths are inside it."""
    pipelines: list[str] = parameter([], EXECUTION)
    """Pipelines that `kedro run` runs if `--pipelines` is not given. If the list is
    empty, `kedro run` runs split, tokenize, train and evaluate."""
    corpus: CorpusSettings = parameter(CorpusSettings(), EXECUTION)
    runtime: RuntimeSettings = RuntimeSettings()
    model: ModelSettings = ModelSettings(config={"model_type": "bert"})
    split: SplitSettings = parameter(SplitSettings(), EXECUTION, UNTIMED)
    tokenize: TokenizeSettings = TokenizeSettings()
    arrays: ArraySettings = parameter(ArraySettings(), EXECUTION)
    images: ImageSettings = parameter(ImageSettings(), EXECUTION)
    train: TrainSettings = TrainSettings()
    benchmark: BenchmarkSettings = parameter(BenchmarkSettings(), EXECUTION, UNTIMED)
    predict: PredictSettings = parameter(PredictSettings(), EXECUTION, UNTIMED)
    mine: MineSettings = parameter(MineSettings(), EXECUTION, UNTIMED)
    export: ExportSettings = parameter(ExportSettings(), EXECUTION, UNTIMED)
    evaluate: EvaluateSettings = parameter(EvaluateSettings(), EXECUTION)
    detect: DetectSettings = parameter(DetectSettings(), EXECUTION)
    sweep: SweepSettings = parameter(SweepSettings(), EXECUTION, UNTIMED)
    tuned: dict[str, Any] = parameter({}, EXECUTION)
    """Record of the benchmark run that chose the settings in conf/tuned. The benchmark
    writes this record, and users do not set it."""
    tracking: TrackingSettings = parameter(TrackingSettings(), EXECUTION, UNTIMED)
    guard: GuardSettings = parameter(GuardSettings(), EXECUTION, UNTIMED)
    paths: PathSettings = parameter(PathSettings(), EXECUTION, UNTIMED)


def parse_settings(parameters: Mapping[str, Any]) -> Settings:
    """Validate all `parameters`. Raises a SettingsError that lists every problem.

    Groups with unknown names are ignored, because they may belong to the user's nodes.
    """
    ours = {name: value for name, value in parameters.items() if _is_ours(name, value)}
    try:
        return Settings.model_validate(with_new_names(ours))
    except ValidationError as error:
        raise refusal(fault_lines(error.errors(), Settings)) from None


def _is_ours(name: str, value: Any) -> bool:
    known = name in Settings.model_fields
    return known or is_misplaced(str(name), value, Settings)


@cache
def in_role(role: str, model: type[SettingsModel] = Settings) -> tuple[str, ...]:
    """Return the paths of all parameters below `model` with the role `role`. If a whole
    group has the role, only the group's path is included."""
    found: list[str] = []
    for path, field in fields_of(model):
        if role in _fact(field, "roles") and not is_in(path, found):
            found.append(path)
    return tuple(found)


@cache
def reported(model: type[SettingsModel] = Settings) -> dict[str, str]:
    """Return a dict from report keys to parameter paths. The report contains the final
    value of the parameter under this key."""
    found = ((path, _fact(field, "reported")) for path, field in fields_of(model))
    return {name: path for path, name in found if name}


def is_in(path: str, entries: Collection[str]) -> bool:
    """Return whether the parameter `path` is in `entries` or in one of their groups."""
    return any(path == entry or path.startswith(f"{entry}.") for entry in entries)


def _fact(field: FieldInfo, name: str) -> Any:
    facts = field.json_schema_extra
    return facts.get(name) or () if isinstance(facts, dict) else ()
