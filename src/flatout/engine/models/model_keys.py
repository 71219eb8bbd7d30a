"""Check the names in `model.config` and `model.overrides`.

transformers accepts any name. A misspelt name is dropped or becomes an attribute that
is never read, so the model would have a different shape than intended.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatout.engine.families import families, family_of_type, import_own
from flatout.engine.machine.hub import missing_folder
from flatout.engine.models.adapters import adapter_faults
from flatout.engine.models.memory import without_weights
from flatout.engine.parameters import (
    ModelSettings,
    SettingsError,
    near_or_all,
    refusal,
)
from flatout.engine.parameters.other_names import REMOVED
from flatout.engine.tasks import task_class

INHERITED = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    }
)
"""Keys that conf/base sets for all models. Models that lack a key ignore it."""
OLDER = frozenset({"rope_theta", "rope_scaling", "torch_dtype"})
"""Keys of older versions of transformers, which transformers 5 converts."""
COMMON = frozenset({"model_type", "num_labels"})


def check_model_keys(settings: ModelSettings) -> None:
    """Raise SettingsError if there are wrong keys, with one message per key."""
    faults = model_key_faults(settings)
    if faults:
        raise refusal(faults)


def model_key_faults(settings: ModelSettings) -> list[str]:
    """Return one message per wrong key, or only one for a missing folder. Remote
    checkpoints are checked later by `override_faults`, after loading."""
    try:
        task_class(settings.task)
    except SettingsError as error:
        return [str(error)]
    if missing := missing_folder(settings.name_or_path):
        return [missing]
    if settings.name_or_path is not None:
        return adapter_faults(settings) or _faults_by_checkpoint(settings)
    kind, keys = str(settings.config["model_type"]), settings.config.keys() - COMMON
    is_known = is_of_transformers(kind)
    import_own(settings)
    if keys <= INHERITED and is_known:  # avoids the import of transformers
        return []
    if not is_known:  # avoids the slow import of torch
        families()  # registers their model types with transformers
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        near = near_or_all(kind, list(CONFIG_MAPPING.keys()), "")
        return [f"model.config.model_type: {kind!r} is unknown to transformers; {near}"]
    valid = _names(CONFIG_MAPPING[kind]) | _switches(kind)
    return _faults("model.config", keys - INHERITED - OLDER, valid, kind)


def is_of_transformers(kind: str) -> bool:
    """Return whether transformers has the model type `kind`, without importing it."""
    spec: Any = find_spec("transformers")
    models = Path(spec.origin).parent / "models"
    return (models / kind.replace("-", "_") / "__init__.py").is_file()


def override_faults(settings: ModelSettings, config: Any) -> list[str]:
    """Return a message for each key in `model.overrides` that the checkpoint lacks."""
    valid = _names(type(config)) | {name for name in vars(config) if name[0] != "_"}
    valid |= _switches(config.model_type)
    keys = settings.overrides.keys() - COMMON
    return _faults("model.overrides", keys, valid, config.model_type)


def inherited_names(config_class: Any) -> frozenset[str]:
    """Return the keys in INHERITED that models with this config class do not have."""
    given = inspect.signature(config_class).parameters
    return INHERITED - _names(config_class) - given.keys()


def _faults_by_checkpoint(settings: ModelSettings) -> list[str]:
    if not (settings.overrides or settings.lora.is_on):
        return []
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            settings.name_or_path,
            revision=settings.revision,
            trust_remote_code=False,
            local_files_only=True,
        )
        faults = override_faults(settings, config)
        if not faults:
            without_weights(config, settings)  # adds the adapter
    except SettingsError as error:
        return [str(error)]
    except (ImportError, KeyError, OSError, TypeError, ValueError):
        return []  # not cached, or custom code: loading will report the error
    return faults


def _faults(
    where: str, keys: Collection[str], valid: Collection[str], kind: str
) -> list[str]:
    return [
        f"{where}.{key}: was removed in this version: {removed}"
        if (removed := REMOVED.get(f"{where}.{key}"))
        else f"{where}.{key}: models of type {kind} have no such key; "
        + near_or_all(key, valid, f"{where}.")
        for key in sorted(set(keys) - set(valid))
    ]


def _switches(kind: str) -> frozenset[str]:
    """Return valid keys that no config class declares but transformers reads."""
    family = family_of_type(kind)
    return frozenset({"is_causal"} if family.causal and family.attends else ())


def _names(config_class: Any) -> frozenset[str]:
    fields = getattr(config_class, "__dataclass_fields__", {})
    return frozenset(fields) | frozenset(config_class.attribute_map)
