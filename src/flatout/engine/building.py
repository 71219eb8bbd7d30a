"""Build or load a transformer, from a checkpoint or from its config alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from flatout.engine import attention
from flatout.engine.heads import position_offset
from flatout.engine.model_keys import override_faults
from flatout.engine.pretrained import load_with_new_head
from flatout.engine.settings import ModelSettings, SettingsError, Task

logger = logging.getLogger(__name__)

AUTO_CLASS: dict[Task, str] = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
}


class ModelError(ValueError):
    """A model that cannot be built, loaded or used for the task."""


@dataclass(frozen=True)
class Vocabulary:
    """What the engine needs to know of a tokenizer."""

    size: int
    pad_token_id: int
    mask_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        return cls(
            size=len(tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            mask_token_id=tokenizer.mask_token_id,
            special_token_ids=tuple(sorted(set(tokenizer.all_special_ids))),
        )


def build(
    settings: ModelSettings,
    vocabulary: Vocabulary,
    label_names: Sequence[str],
    max_length: int,
    attn_implementation: str,
) -> Any:
    """A model with fp32 weights on the CPU. Raises ModelError, SettingsError."""
    transformers = _quiet_transformers()
    attention.register()
    config = _config(settings, vocabulary, label_names)
    _check_positions(config, max_length)
    auto = getattr(transformers, AUTO_CLASS[settings.task])
    # Without it transformers takes the checkpoint's own type, and a bf16 checkpoint
    # would be trained without fp32 master weights.
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": attn_implementation,
    }
    if settings.name_or_path is None:
        return _from_scratch(auto, config, settings, options)
    try:
        return load_with_new_head(
            auto,
            settings.name_or_path,
            config=config,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_load_fault(settings, error)) from error


def _from_scratch(
    auto: Any, config: Any, settings: ModelSettings, options: dict[str, Any]
) -> Any:
    try:
        return auto.from_config(config, **options)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A size of 0 is divided by, one below 0 is none of a tensor.
        raise ModelError(_load_fault(settings, error)) from error


def load_pretrained(folder: Path) -> Any:
    """A model saved by `save_pretrained`, of the class that was saved, on the CPU."""
    transformers = _quiet_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)


def _quiet_transformers() -> Any:
    """The library, without bars for loading weights and writing shards, which would
    break into the line of progress."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def _config(
    settings: ModelSettings, vocabulary: Vocabulary, label_names: Sequence[str]
) -> Any:
    import transformers

    extra = dict(settings.applied_config)
    extra["use_cache"] = False
    if settings.task == "regression":
        extra |= {"num_labels": 1, "problem_type": "regression"}
    elif settings.task == "sequence-classification":
        extra["problem_type"] = "single_label_classification"
        extra["id2label"] = dict(enumerate(label_names))
        extra["label2id"] = {name: index for index, name in enumerate(label_names)}
    if settings.name_or_path is None:
        extra.setdefault("vocab_size", vocabulary.size)
        extra.setdefault("pad_token_id", vocabulary.pad_token_id)
    config = _load_config(settings, extra, transformers)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = vocabulary.pad_token_id
    if config.vocab_size < vocabulary.size:
        raise ModelError(
            f"model.config.vocab_size={config.vocab_size} is smaller than the "
            f"tokenizer's {vocabulary.size} pieces: raise it, or lower "
            "tokenize.vocab_size"
        )
    return config


def _foreign_tokens(kind: str, vocab_size: int, transformers: Any) -> dict[str, None]:
    """Defaults that a smaller vocabulary does not have, as GPT-2's end of text, number
    50,256: given as None, since transformers warns of them when a config is made."""
    defaults = transformers.AutoConfig.for_model(kind)
    return {
        name: None
        for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        if isinstance(token := getattr(defaults, name, None), int)
        and token >= vocab_size
    }


def _load_config(
    settings: ModelSettings, extra: dict[str, Any], transformers: Any
) -> Any:
    try:
        if settings.name_or_path is None:
            kind = extra.pop("model_type")
            foreign = _foreign_tokens(kind, extra["vocab_size"], transformers)
            return transformers.AutoConfig.for_model(kind, **{**foreign, **extra})
        extra.pop("model_type", None)
        config = transformers.AutoConfig.from_pretrained(
            settings.name_or_path,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
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
    # Checks of a config's fields tell what is wrong in their second line.
    reason = " ".join(" ".join(lines[: 2 if lines[0].endswith(":") else 1]).split())
    if name is None:
        return (
            f"model.config: no {AUTO_CLASS[settings.task]} can be built from "
            f"{settings.config}: {reason}"
        )
    folder = Path(name)
    if folder.is_dir():
        needed = [
            f for f in ("config.json", "model.safetensors") if not (folder / f).exists()
        ]
        missing = f"; missing there: {', '.join(needed)}" if needed else ""
        return (
            f"model.name_or_path: {folder} cannot be loaded for task "
            f"{settings.task}{missing}: {reason}"
        )
    return (
        f"model.name_or_path: {name!r} is neither a folder here nor could it be "
        f"fetched from the Hub (looked for config.json and model.safetensors; "
        f"revision {settings.revision or 'main'}): {reason}. Set it to a folder that "
        "holds them, or to null with model.config to train from scratch"
    )


def _check_positions(config: Any, max_length: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return
    usable = positions - position_offset(config)
    if max_length > usable:
        raise SettingsError(
            f"tokenize.max_length={max_length} is beyond the model's {usable} "
            f"positions: set it to at most {usable}"
            + ("" if usable == positions else f" ({positions} less padding_idx + 1)")
        )
