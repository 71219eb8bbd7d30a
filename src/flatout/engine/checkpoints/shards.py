"""Load the tensors of checkpoints, and convert tensors that are sharded over ranks.
Checkpoints contain whole tensors. In version 0.1, each rank wrote its shards to a
separate file with the rank in its name. When such a checkpoint is loaded, the shards
are concatenated in the order of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

Named = dict[str, Tensor]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without the slow import of the class."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. If it is sharded, all ranks must call this."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def load_whole(folder: Path, name: str) -> Named:
    """Load all tensors of the file `name` in `folder`, and join their shards."""
    parts: dict[str, list[Tensor]] = {}
    stem, _, kind = name.rpartition(".")
    for path in [folder / name, *sorted(folder.glob(f"{stem}.*.{kind}"))]:
        with safe_open(path, "pt") as file:
            for key in file.keys():
                parts.setdefault(key, []).append(file.get_tensor(key))
    return {n: p[0] if len(p) == 1 else torch.cat(p) for n, p in parts.items()}


@torch.no_grad()
def fill_own_part(target: Any, whole: Tensor) -> None:
    """Copy `whole` into `target`, or only the part that belongs to this rank if
    `target` is sharded. Each rank must pass the complete tensor as `whole`."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    placed = distribute_tensor(
        whole, target.device_mesh, target.placements, src_data_rank=None
    )
    target.to_local().copy_(placed.to_local())
