"""Build a transformers model from a checkpoint, or from scratch from its config."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from flatout.engine.families import (
    families,
    family_of_type,
    import_own,
    model_class,
    note_own_code,
)
from flatout.engine.machine.hub import missing_folder, where_to_look
from flatout.engine.models.adapters import (
    CONFIG as ADAPTER_CONFIG,
    MARK,
    PREFIX,
    adapter_of,
)
from flatout.engine.models.model_keys import inherited_names, override_faults
from flatout.engine.models.pretrained import load_with_new_head, no_notes
from flatout.engine.ops import attention
from flatout.engine.parameters import ModelSettings, SettingsError
from flatout.engine.parameters.faults import first_line
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import Task
from flatout.engine.tokenizing.tokenizer_checks import usable_positions

FAULTS = (ArithmeticError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""The errors of a model whose files or sizes are wrong. A size of 0, for example, leads
to a division by zero. Other errors are bugs in the model's code."""


class ModelError(ValueError):
    """Raised if a model cannot be built, loaded or used for the task."""


def build(
    settings: ModelSettings,
    task: Task,
    vocabulary: Vocabulary | None,
    max_length: int,
    attn_implementation: str | None = None,
    *,
    empty: bool = False,
    facts: Any = None,
) -> Any:
    """Build a model with fp32 weights on the CPU.

    If `attn_implementation` is None, transformers chooses it. If `empty` is true, the
    model is on the meta device, for a rank that receives its weights later. `facts`
    contains statistics of the train rows. Raises ModelError if the model cannot be
    built, and SettingsError if the settings do not fit the model.
    """
    transformers = _quiet_transformers()
    attention.register()
    families()  # registers their model types with transformers
    import_own(settings)
    config = _config(settings, task, vocabulary, facts)
    vars(config).pop(MARK, None)  # training changes the weights
    _check_positions(config, max_length)
    auto = getattr(transformers, task.auto_class)
    # By default, transformers keeps the checkpoint's dtype, so a bf16 checkpoint would
    # be trained without fp32 master weights.
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": attn_implementation,
    }
    model = _made(auto, config, settings, options, empty=empty)
    note_own_code(model)
    if vocabulary and vocabulary.end_token_id is not None and model.can_generate():
        _stop_at(vocabulary.end_token_id, model)
    return model


def _stop_at(end_id: int, model: Any) -> None:
    """Make generation also stop at the tokenizer's end token, as transformers' Trainer
    does. The checkpoint's generation config may list only other tokens."""
    known = model.generation_config.eos_token_id
    ids = known if isinstance(known, list) else [known]
    if end_id not in ids:
        ids = [end_id, *(id_ for id_ in ids if id_ is not None)]
        listed = isinstance(model.config.eos_token_id, list)
        model.config.eos_token_id = ids if listed else end_id
        model.generation_config.eos_token_id = ids


def _made(
    auto: Any,
    config: Any,
    settings: ModelSettings,
    options: dict[str, Any],
    *,
    empty: bool,
) -> Any:
    name, trusts = settings.name_or_path, settings.trust_remote_code
    try:
        if name is not None and not empty:
            return _from_checkpoint(auto, config, name, settings, options)
        if empty and trusts:
            options |= {"trust_remote_code": True, "code_revision": settings.revision}
        with torch.device("meta") if empty else nullcontext():
            return auto.from_config(config, **options)
    except FAULTS as error:
        raise ModelError(_load_fault(settings, error)) from error


def _from_checkpoint(
    auto: Any, config: Any, name: str, settings: ModelSettings, options: dict[str, Any]
) -> Any:
    from transformers import PretrainedConfig

    where = {"revision": settings.revision, **where_to_look(name)}
    options["trust_remote_code"] = trusts = settings.trust_remote_code
    saved, _ = PretrainedConfig.get_config_dict(name, **where)
    if adapter_of(name):  # merge the adapter into the weights and train all of them
        whole = load_pretrained(Path(name), trust_remote_code=trusts)
        options["state_dict"] = whole.state_dict()
    options |= {"config": config, "use_safetensors": True, **where}
    return load_with_new_head(auto, name, saved, **options)


def load_pretrained(
    folder: Path, *, trust_remote_code: bool = False, merge: bool = True, **options: Any
) -> Any:
    """Load a model that `save_pretrained` saved to `folder`, on the CPU. An adapter is
    loaded with its base model, and merged into it if `merge` is true. Raises ModelError
    if the model's class is unknown, if its code is not trusted, or if the base model of
    an adapter cannot be loaded."""
    transformers = _quiet_transformers()
    config, _ = transformers.PretrainedConfig.get_config_dict(folder)
    kind = _saved_class(config, transformers, trust_remote_code)
    if kind is None:
        raise ModelError(
            f"{folder}/config.json names {config.get('architectures') or 'no class'}, "
            f"which transformers {transformers.__version__} does not have. For a model "
            "of your own family, set model.family to its module; for code in the "
            "folder, set trust_remote_code: true"
        )
    own = {"trust_remote_code": True} if trust_remote_code else {}
    options = {"dtype": torch.float32, "use_safetensors": True, **own, **options}
    if adapter := adapter_of(folder):
        options["config"] = transformers.AutoConfig.from_pretrained(folder, **own)
        return _with_adapter(kind, folder, adapter, options, merge=merge)
    return kind.from_pretrained(folder, **options)


def _with_adapter(
    kind: Any, folder: Path, adapter: Any, options: dict[str, Any], *, merge: bool
) -> Any:
    """Load the adapter in `folder` on top of its base model, which has the class
    `kind`. Raises ModelError if the base model cannot be loaded."""
    name = str(adapter["base_model_name_or_path"])
    where = {"revision": adapter.get("revision"), **where_to_look(name)}
    try:
        from peft import PeftConfig, PeftModel, set_peft_model_state_dict
        from peft.utils import load_peft_weights

        with no_notes():  # the adapter provides the head that the base model lacks
            model = kind.from_pretrained(
                name, ignore_mismatched_sizes=True, **where, **options
            )
    except (ImportError, OSError, ValueError) as error:
        fault = "there is no such folder" if missing_folder(name) else first_line(error)
        raise ModelError(
            f"{folder} has an adapter for {name}, which cannot be loaded "
            f"({fault}): install 'flatout[lora]', put the base back there, "
            f"or correct base_model_name_or_path in {folder}/{ADAPTER_CONFIG}"
        ) from error
    if merge:
        with warnings.catch_warnings():  # about a property that transformers 5 renamed
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    else:
        # load_adapter of transformers 5.23 does not find DoRA's magnitudes.
        model.add_adapter(PeftConfig.from_pretrained(str(folder)))
        weights = load_peft_weights(str(folder)).items()
        own = {name.removeprefix(PREFIX): weight for name, weight in weights}
        set_peft_model_state_dict(model, own)
    model.config.name_or_path = str(folder)
    return model


def _saved_class(
    config: dict[str, Any], transformers: Any, trust_remote_code: bool
) -> Any | None:
    """Return the class listed in `config`. For custom code in the folder, return the
    Auto class that loads it. Return None if the class is not found."""
    (name, *_) = config.get("architectures") or ("",)
    if own := model_class(name):
        return own
    code = config.get("auto_map", {}) if trust_remote_code else {}
    for automatic, reference in code.items():
        if str(reference).rpartition(".")[2] == name:
            return getattr(transformers, automatic)
    return getattr(transformers, name, None)


def _quiet_transformers() -> Any:
    """Import transformers, turn off its progress bars and return the module."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def _config(
    settings: ModelSettings, task: Task, vocabulary: Vocabulary | None, facts: Any
) -> Any:
    keys = task.config_keys()
    extra = {**settings.applied_config, **keys}
    _check_num_labels(settings.applied_config, keys)
    if settings.name_or_path is None:
        kind = extra["model_type"]
        samples = family_of_type(kind).samples
        known = {**samples.shape_keys(facts), **samples.statistics_keys(facts)}
        extra = {**known, **extra}
        if vocabulary:
            extra.setdefault("vocab_size", vocabulary.size)
            extra.setdefault("pad_token_id", vocabulary.pad_token_id)
    config = _load_config(settings, extra, vocabulary)
    if fault := task.model_fault(config):
        raise ModelError(fault)
    if settings.name_or_path is not None:
        _fit_samples(config, settings, facts)
    if fault := family_of_type(config.model_type).samples.fault(config):
        raise ModelError(fault)
    config.flatout_task = settings.task
    if task.pooling:
        config.flatout_pooling = task.pooling
    if vocabulary:
        _fit_vocabulary(config, vocabulary)
    return config


def _check_num_labels(given: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Raise ModelError if the user's config `given` and the task's config `keys` differ
    in the number of outputs."""
    found = given.get("num_labels")
    wanted = len(keys["id2label"]) if "id2label" in keys else keys.get("num_labels")
    if found is not None and wanted is not None and found != wanted:
        raise ModelError(
            f"num_labels is {found}, and the model needs {wanted} outputs for the task "
            "and its labels: remove it from model.config or model.overrides"
        )


def _fit_samples(config: Any, settings: ModelSettings, facts: Any) -> None:
    """Add missing statistics to `config`. Raises ModelError if the samples do not have
    the shape that the config requires."""
    samples = family_of_type(config.model_type).samples
    name, known = str(settings.name_or_path), samples.statistics_keys(facts)
    if any(getattr(config, key, None) is None for key in known):
        where = {"revision": settings.revision, **where_to_look(name)}
        try:
            known |= samples.checkpoint_statistics(config, name, **where)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{name}: its means and deviations cannot be read ({error}): fetch it "
                "again, or set model.overrides.image_mean and image_std, on the scale "
                "of 0 to 255"
            ) from error
    for key, value in (known | samples.shape_keys(facts)).items():
        if getattr(config, key, None) is None:
            setattr(config, key, value)
    for key, value in samples.shape_keys(facts).items():
        if (own := getattr(config, key)) != value:
            raise ModelError(
                f"model.name_or_path: its {key} is {own}, but the rows have {value}: "
                f"change the rows (images.size, images.channels), or set "
                f"model.overrides.{key}"
            )


def _fit_vocabulary(config: Any, vocabulary: Vocabulary) -> None:
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = vocabulary.pad_token_id
    if config.vocab_size < vocabulary.size:
        raise ModelError(
            f"model.config.vocab_size={config.vocab_size} is smaller than the "
            f"tokenizer's {vocabulary.size} pieces: raise it, or lower "
            "tokenize.vocab_size"
        )


def _special_tokens(
    kind: str, vocabulary: Vocabulary, vocab_size: int
) -> dict[str, int | None]:
    """Return the config keys of the tokenizer's special tokens. A default id beyond the
    vocabulary, such as GPT-2's end of text (50,256), is replaced with None."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(kind)
    start, end = vocabulary.start_token_id, vocabulary.end_token_id
    known = {"bos_token_id": start, "cls_token_id": start}
    known |= {"eos_token_id": end, "sep_token_id": end}
    found = {}
    for name, number in known.items():
        default = getattr(defaults, name, None)
        foreign = isinstance(default, int) and default >= vocab_size
        if (number is not None and hasattr(defaults, name)) or foreign:
            found[name] = number
    return found


def _load_config(
    settings: ModelSettings, extra: dict[str, Any], vocabulary: Vocabulary | None
) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = extra.pop("model_type", None)
    try:
        if settings.name_or_path is None:
            unused = inherited_names(CONFIG_MAPPING[kind])
            extra = {name: extra[name] for name in extra.keys() - unused}
            if vocabulary and (size := extra.get("vocab_size")):
                extra = _special_tokens(kind, vocabulary, size) | extra
            return AutoConfig.for_model(kind, **extra)
        config = AutoConfig.from_pretrained(
            settings.name_or_path,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            **where_to_look(settings.name_or_path),
            **extra,
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(_load_fault(settings, error)) from error
    faults = override_faults(settings, config)
    if faults:
        raise ModelError("; ".join(faults))
    return config


def _load_fault(settings: ModelSettings, error: Exception) -> str:
    name, lines = settings.name_or_path, str(error).strip().split("\n")
    # Field validation errors of a config give the reason in their second line.
    reason = " ".join(" ".join(lines[: 2 if lines[0].endswith(":") else 1]).split())
    if reason.startswith("Unrecognized configuration class"):
        reason = (
            "transformers has no model of its type for this task. Name one made for "
            "such data, or set another model.task (docs/tasks.md)"
        )
    if name is None:
        return (
            f"model.config: no model for task {settings.task} can be built from "
            f"{settings.config}: {reason}"
        )
    fault = f"model.name_or_path: {name} cannot be loaded for task {settings.task}"
    if Path(name).is_dir():
        return f"{fault}: {reason}"
    return (
        f"{fault} from the Hub (revision {settings.revision or 'main'}): {reason}. Set "
        "it to a folder with config.json and model.safetensors, or to null with "
        "model.config to train from scratch"
    )


def _check_rope(config: Any, max_length: int) -> None:
    """Raise SettingsError if position encodings depend on the longest row of a
    batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind, known = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    limit = known or getattr(config, "max_position_embeddings", None)
    if kind in ("dynamic", "longrope") and limit and max_length > limit:
        raise SettingsError(
            f"tokenize.max_length={max_length}: with rope_type {kind}, positions "
            f"change for all rows of a batch once one of them has over {limit} tokens, "
            f"so outputs depend on the batch: set it to at most {limit}"
        )


def _check_positions(config: Any, max_length: int) -> None:
    _check_rope(config, max_length)
    usable = usable_positions(config.to_dict())
    if usable is None or max_length <= usable:
        return
    positions = config.max_position_embeddings
    raise SettingsError(
        f"tokenize.max_length={max_length} is beyond the model's {usable} "
        f"positions: set it to at most {usable}"
        + ("" if usable == positions else f" ({positions} minus padding_idx + 1)")
    )
