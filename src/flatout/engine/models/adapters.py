"""Select the parameters to train: LoRA adapters (peft), or all parameters that are not
frozen.

LoRA adds two small trainable matrices to each target layer and freezes the layer's own
weights.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.families import family_of
from flatout.engine.parameters import (
    LoraSettings,
    ModelSettings,
    SettingsError,
    near_or_all,
)
from flatout.engine.tasks import HeadKind, Task

if TYPE_CHECKING:
    import torch
    from torch import nn


CONFIG = "adapter_config.json"
MERGED = "merged"
"""The subfolder of an adapter's folder that contains the merged model."""
MARK = "flatout_merged_adapter"
"""The config key that marks a merged model."""
PREFIX = "base_model.model."
"""The prefix of parameter names in peft's files."""
TASK_TYPES = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
"""The task type in peft for each Auto class. For other classes, peft needs the name of
the model's class."""


def add_adapter(
    model: Any, settings: ModelSettings, task: Task, new: Sequence[str] = ()
) -> None:
    """Add an adapter to `model`, and freeze everything except the adapter and the head.
    Do nothing if `model.lora` is off. `new` lists weights that the checkpoint lacks.
    Raises SettingsError if a target matches no layer, or if the model cannot have an
    adapter."""
    lora = settings.lora
    if lora.rank is None:
        return
    if faults := adapter_faults(settings):
        raise SettingsError("; ".join(faults))
    targets = _targets(model, lora)
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_dora=lora.use_dora,
        modules_to_save=_trained_whole(model, task, new) or None,
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
        task_type=TASK_TYPES.get(task.auto_class),
        revision=settings.revision,
    )
    if config.task_type is None:
        kind = type(model)
        config.auto_mapping = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    model.add_adapter(config)
    for layer in model.modules():
        # Autocast casts the inputs anyway. DoRA needs this cast for its fp32 norms.
        if isinstance(layer, LoraLayer) and not lora.use_dora:
            layer.cast_input_dtype_enabled = False


def round_frozen(model: Any, dtype: torch.dtype) -> None:
    """Convert the weight matrices of frozen linear layers to `dtype`. This saves a copy
    in each forward pass and does not change results, because autocast would convert
    them too. Matrices that are tied to embeddings are not converted. With DoRA, no
    matrix is converted, because the fp32 norms are needed."""
    from torch import nn

    if not has_adapter(model) or model.peft_config["default"].use_dora:
        return
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for layer in model.modules():
        weight = layer.weight if type(layer) is nn.Linear else None
        if weight is not None and not weight.requires_grad and uses[id(weight)] == 1:
            weight.data = weight.data.to(dtype)


def adapter_of(folder: str | Path | None) -> dict[str, Any] | None:
    """Return the adapter config in a local folder, or None if there is no adapter."""
    file = Path(folder or "", CONFIG)
    if not folder or not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8"))


def has_adapter(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_faults(settings: ModelSettings) -> list[str]:
    """Return the errors in `model.lora` that can be found without loading weights."""
    name, rank = settings.name_or_path, settings.lora.rank
    here = f"model.lora.rank={rank}"
    found = adapter_of(name)
    if rank is None and found is None:
        return []
    if find_spec("peft") is None:
        what = here if rank else f"model.name_or_path={name}, an adapter,"
        return [f"{what} needs peft: pip install 'flatout[lora]'"]
    if rank is None:
        return []
    if found is not None:
        base = found.get("base_model_name_or_path")
        return [
            f"{here}: {name} is an adapter already, and cannot have a second one: set "
            f"model.name_or_path to its base, {base}, or train it whole with "
            "model.lora.rank: null"
        ]
    file = Path(name or "", "config.json")
    if name and file.is_file() and MARK in file.read_text("utf-8"):
        return [
            f"{here}: {name} has an adapter merged into it, and a second one would "
            "depend on both: set model.name_or_path to the first one's base, or remove "
            f"{MARK} from its config.json to go on from these weights"
        ]
    return []


def _targets(model: Any, lora: LoraSettings) -> list[str]:
    """Return the names of the layers that match `lora.targets`. Raises SettingsError if
    a target matches no layer, or if the model has no attention blocks."""
    layers = _linear_layers(model)
    if not (family_of(model.config).attends and any(layers.values())):
        raise SettingsError(
            f"model.lora.rank={lora.rank}: a {model.config.model_type} model has no "
            "blocks of attention to adapt: set model.lora.rank: null, and train.freeze "
            "to train a part of it"
        )
    if not lora.targets:
        return [name for name, in_block in layers.items() if in_block]
    for target in lora.targets:
        if not any(_ends(name, target) for name in layers):
            ends = {name.rpartition(".")[2] for name in layers}
            raise SettingsError(
                f"model.lora.targets: {target!r} matches no linear layer below the "
                f"head; {near_or_all(target, ends)}"
            )
    return [n for n in layers if any(_ends(n, target) for target in lora.targets)]


def _linear_layers(model: Any) -> dict[str, bool]:
    """Return the names of all linear layers below the head, each mapped to whether the
    layer is part of a block."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    body, lists = set(model.base_model.modules()), ["?"]
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            lists.append(f"{name}.")
        if isinstance(module, (nn.Linear, Conv1D)) and module in body:
            found[name] = name.startswith(tuple(lists))
    return found


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _trained_whole(model: Any, task: Task, new: Sequence[str]) -> list[str]:
    """Return the names of modules that are trained without an adapter: the head (except
    in language models) and modules that the checkpoint lacks."""
    if task.head_kind in (HeadKind.VOCABULARY, HeadKind.DIRECTIONS):
        if new:
            raise SettingsError(
                f"model.lora: the checkpoint has no {', '.join(new)}, and an adapter "
                "cannot make up for it: set model.name_or_path to a checkpoint with "
                "the head of a language model, or model.lora.rank: null"
            )
        return []
    body = {id(p) for p in model.base_model.parameters()}
    heads = [
        name
        for name, module in model.named_children()
        if any(id(p) not in body for p in module.parameters())
    ]
    unused = "pooler." if task.pooling else "?"
    others = {name.rpartition(".")[0] for name in new if not name.startswith(unused)}
    return heads + sorted(n for n in others if n.partition(".")[0] not in heads)


def name_in_file(name: str) -> str:
    """Return the name that the model's parameter `name` has in an adapter file."""
    for ours, theirs in (
        (".modules_to_save.default", ""),
        (".lora_magnitude_vector.default.weight", ".lora_magnitude_vector"),
        (".default.", "."),
    ):
        name = name.replace(ours, theirs)
    return PREFIX + name


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose dotted name contains a match for one of the regex
    `patterns`. The backward pass ends at the lowest parameter that is not frozen.
    Raises SettingsError if a pattern matches nothing or all would be frozen."""
    for pattern in patterns:
        fits = re.compile(rf"(^|\.)({pattern})(\.|$)").search
        found = [p for name, p in model.named_parameters() if fits(name)]
        if not found:
            parts = {
                part for name, _ in model.named_modules() for part in name.split(".")
            }
            near = near_or_all(pattern, [part for part in parts if part.isidentifier()])
            raise SettingsError(f"train.freeze: {pattern!r} matches no module; {near}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingsError("train.freeze matches all parameters: remove a pattern")
