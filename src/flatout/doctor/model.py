"""Check the checkpoint in `model.name_or_path` without downloading or loading it, and
check the memory and disk space that the model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.families import families
from flatout.engine.machine.checks import LEAST_FREE_BYTES, Finding, gib
from flatout.engine.models.memory import Estimate, count_parameters
from flatout.engine.models.model_keys import model_key_faults
from flatout.engine.parameters import ModelSettings, Settings
from flatout.engine.tasks import task_class

PARAMETER = "model.name_or_path"


class NotCached(ValueError):
    """Raised if the config of a checkpoint is not on this machine yet."""


def read_config(settings: Settings) -> Any:
    """Return the model's config without using the network. Raises NotCached if the
    config would have to be downloaded."""
    model = settings.model
    name, changes = model.name_or_path, dict(model.applied_config)
    kind = changes.pop("model_type", None)
    if name is None:
        changes.setdefault("vocab_size", settings.tokenize.vocab_size)
    import transformers

    families()  # registers flatout's model types

    if name is None:
        return transformers.AutoConfig.for_model(kind, **changes)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise NotCached(name)
    try:
        return transformers.AutoConfig.from_pretrained(
            name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            **changes,
        )
    except OSError as error:
        raise NotCached(str(error)) from error


def checkpoint(settings: ModelSettings, config: Any | None) -> Finding:
    """Return a finding about the checkpoint in `settings`. `config` is the model's
    config, or None if it is not on this machine yet."""
    name, faults = settings.name_or_path, model_key_faults(settings)
    if faults:
        return Finding("model", "fail", "; ".join(faults), "correct them in conf/")
    if name is None:
        kind = settings.config.get("model_type")
        return Finding("model", "ok", f"{kind}, trained from scratch")
    if config is None:
        return _absent(name)
    text = f"{name}: {config.model_type}"
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        fix = "save it with save_pretrained (safetensors is its default)"
        return Finding("model", "fail", f"{text}, no *.safetensors there", fix)
    saved = ", ".join(config.architectures or []) or "no head"
    text += f", saved as {saved}"
    heads = task_class(settings.task).architectures
    if any(name.endswith(heads) for name in config.architectures or []):
        return Finding("model", "ok", text)
    text += f"; its head is not one for {settings.task} and starts from scratch"
    return Finding("model", "ok", text)


def _absent(name: str) -> Finding:
    if Path(name).is_dir():
        text = f"{name} has no config.json"
        fix = f"set {PARAMETER} to a folder that save_pretrained wrote"
        return Finding("model", "fail", text, fix)
    text = f"{name} is not on this machine: the run fetches it from the Hub"
    fix = f"without network, fetch it elsewhere and set {PARAMETER} to its folder"
    return Finding("model", "warn", text, fix)


CHECKPOINT_BYTES = 12
"""Bytes per weight in a checkpoint, including the weight's two optimizer moments."""


def disk_bytes(config: Any, settings: ModelSettings, keep: int) -> int:
    """Return the disk space in bytes (at least 1 GiB) for `keep` checkpoints, another
    one that is being written, and the copies of the best and last model."""
    parameters = count_parameters(config, settings)
    needed = parameters * (CHECKPOINT_BYTES * (keep + 1) + 4 * 4)
    return max(LEAST_FREE_BYTES, needed)


def memory_finding(found: Estimate, available: int, where: str) -> Finding:
    """Return a finding that compares the memory needed with the `available` bytes.
    `where` is the name of the GPU or "free RAM"."""
    text = (
        f"about {gib(found.total)} of {gib(available)} ({where}): "
        f"{found.parameters / 1e6:.1f} M weights with gradients and Adam "
        f"{gib(found.states)}, {found.tokens} tokens at once {gib(found.activations)}"
    )
    if found.states > available:
        fix = "train.distributed.strategy: fsdp on several GPUs, or a smaller model"
        return Finding("memory", "fail", text, fix)
    if found.total > available:
        fix = (
            "lower train.token_budget (kedro run --pipelines=benchmark finds the "
            "largest that fits), or set train.gradient_checkpointing: true"
        )
        return Finding("memory", "warn", text, fix)
    return Finding("memory", "ok", text)
