"""Models on the disk as `save_pretrained` leaves them, and back into training.

A sharded model is gathered first, so that any saved one loads with `from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout.engine.assemble import Trainer
from flatout.engine.building import load_pretrained
from flatout.engine.jobs.checkpoint import (
    broadcast,
    fill_tensors,
    is_sharded,
    named_tensors,
    whole_tensor,
)
from flatout.engine.jobs.checkpoint_folder import write_whole


class SaveError(OSError):
    """A model could not be written: a full disk, most often."""

    exit_code = 1


def save_model(trainer: Trainer, folder: Path, control: Any) -> None:
    """`save_pretrained` to `folder`, whole or not at all; all ranks call it, and all
    go on after it. Raises SaveError on all of them."""
    model, fault = trainer.model.model, None
    is_main = trainer.runtime.ranks.is_main
    weights = _gathered(model, is_main)
    if is_main:
        try:
            write_whole(
                folder, lambda hidden: model.save_pretrained(hidden, state_dict=weights)
            )
        except Exception as error:  # each library has its own for a full disk
            fault = f"{folder} was not saved: {error}"
    if fault := broadcast(fault, control):
        raise SaveError(fault)


def _gathered(model: nn.Module, is_main: bool) -> dict[str, Tensor] | None:
    """All weights on the host, tied ones shared; None where nothing is sharded."""
    state = model.state_dict(keep_vars=True)
    if not any(is_sharded(tensor) for tensor in state.values()):
        return None
    whole: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in whole:
            gathered = whole_tensor(tensor)  # all ranks take part, one keeps it
            whole[id(tensor)] = gathered.cpu() if is_main else gathered[:0]
    return {name: whole[id(tensor)] for name, tensor in state.items()}


def load_weights(trainer: Trainer, folder: Path, control: Any) -> None:
    """Weights of a saved model, read by the main rank, into the one in training."""
    values = None
    if trainer.runtime.ranks.is_main:
        values = named_tensors(load_pretrained(folder))
    fill_tensors(named_tensors(trainer.model.model), values, trainer.runtime, control)
