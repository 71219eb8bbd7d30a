"""Save models with `save_pretrained`, and load saved weights into a running model.

Sharded models are gathered first, so that every saved model can be loaded with
`from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flatout.engine.checkpoints.shards import is_sharded, whole_tensor
from flatout.engine.files.atomic_write import write_folder
from flatout.engine.models.adapters import has_adapter, name_in_file
from flatout.engine.models.building import load_pretrained
from flatout.engine.train.keeping.snapshots import fill_tensors, named_tensors
from flatout.engine.train.process_group import broadcast
from flatout.engine.train.setup.assemble import Trainer


class SaveError(OSError):
    """Raised if a model cannot be saved, usually because the disk is full."""

    exit_code = 1


def save_model(trainer: Trainer, folder: Path, control: Any) -> None:
    """Save the model to `folder` atomically. All ranks must call this function, and all
    raise SaveError if saving fails."""
    fault, is_main = None, trainer.runtime.ranks.is_main
    weights = _gathered(trainer.model.model, is_main)
    if is_main:
        try:
            write_folder(
                folder, lambda hidden: trainer.model.save_pretrained(hidden, weights)
            )
        except Exception as error:  # libraries raise different errors for a full disk
            fault = f"{folder} was not saved: {error}"
    if fault := broadcast(fault, control):
        raise SaveError(fault)


def _gathered(model: nn.Module, is_main: bool) -> dict[str, Tensor] | None:
    """Return the state dict of a sharded model, or None if it is not sharded. Only the
    main rank's tensors have values. Tied weights share memory."""
    state = model.state_dict(keep_vars=True)
    if not any(is_sharded(tensor) for tensor in state.values()):
        return None
    whole: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in whole:
            gathered = whole_tensor(tensor)  # a collective operation
            whole[id(tensor)] = gathered.cpu() if is_main else torch.empty(0)
            del gathered  # free it before the next one
    return {name: whole[id(tensor)] for name, tensor in state.items()}


def load_weights(trainer: Trainer, folder: Path, control: Any) -> None:
    """Load the weights of the saved model in `folder` into the model of each rank. Only
    the main rank reads the files."""
    model = trainer.model.model
    targets = named_tensors(model)
    values: dict[str, Tensor] | None = None
    if has_adapter(model):
        targets = {name: t for name, t in targets.items() if t.requires_grad}
    if trainer.runtime.ranks.is_main:
        values = {}  # read directly from the files, without building a model
        for file in sorted(folder.glob("*.safetensors")):
            values |= load_file(file)
        if has_adapter(model):
            values = {name: values[name_in_file(name)] for name in targets}
        if values.keys() != targets.keys():  # e.g. experts are saved separately
            trusts = trainer.job.settings.model.trust_remote_code
            values = named_tensors(load_pretrained(folder, trust_remote_code=trusts))
    fill_tensors(targets, values, trainer.runtime, control)
