"""Load the tensors of checkpoints, and convert tensors that are sharded over ranks.

Checkpoints contain whole tensors in safetensors files. In version 0.1, each rank wrote
its shards to a separate file, whose header contains their offsets. Such shards are
joined when they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from flatout.engine.checkpoints.checkpoint_folder import CheckpointError

Named = dict[str, Tensor]
SHARDING, BEGINS = "DCP_SHARDING_INFO", "saved_offsets"
"""The keys of the offsets in the header of a file from version 0.1."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing the class (about 1 s)."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. All ranks must call this if it is sharded."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def load_whole(folder: Path, name: str) -> Named:
    """Load all tensors of the file `name` in `folder`, and join their shards."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    stem, _, kind = name.rpartition(".")
    for path in [folder / name, *sorted(folder.glob(f"{stem}.*.{kind}"))]:
        with safe_open(path, "pt") as file:
            begins = _first_rows(file)
            for key in file.keys():
                part = begins.get(key, 0), file.get_tensor(key)
                parts.setdefault(key, []).append(part)
    return {name: _joined(found) for name, found in parts.items()}


def _first_rows(file: Any) -> dict[str, int]:
    """Return the index of the first row of each shard in a file."""
    try:
        known = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
        return {name: int([*entry[BEGINS], 0][0]) for name, entry in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the header of a shard is damaged: {error}") from None


def _joined(parts: Iterable[tuple[int, Tensor]]) -> Tensor:
    rows = [part for _, part in sorted(parts, key=lambda entry: entry[0])]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@torch.no_grad()
def fill_own_part(target: Any, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `target`. All ranks must have `whole`."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    placed = distribute_tensor(
        whole, target.device_mesh, target.placements, src_data_rank=None
    )
    target.to_local().copy_(placed.to_local())
