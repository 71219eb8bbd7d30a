"""Tensors of a checkpoint as safetensors, whole or one part per rank, without pickle.

Sharded weights use the layout of `torch.distributed.checkpoint` for Hugging Face: each
rank's parts in a separate file, with the offset of each part in the file's header. Any
number of ranks can read them, each only its part. PyTorch's own format has pickled
metadata, which must not be loaded from an untrusted checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.engine.checkpoints.checkpoint_folder import CheckpointError

Named = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Offsets = dict[str, list[int]]
SHARDING, BEGINS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys in a header, as PyTorch reads them."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor."""

    data: Tensor
    offsets: list[int]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without the import of that class (a second)."""
    return hasattr(tensor, "full_tensor")


def is_any_sharded(tensors: Named) -> bool:
    return any(is_sharded(tensor) for tensor in tensors.values())


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached; a collective operation if it is sharded."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def own_parts(tensors: Named, *, is_main: bool) -> dict[str, Part]:
    """Parts of this rank; the main one also has all tensors that are not sharded."""
    parts = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
            if chunk.sizes.numel():
                data = tensor.detach().to_local()  # type: ignore[attr-defined]
                parts[name] = Part(data, list(chunk.offsets))
        elif is_main:
            parts[name] = Part(tensor, [0] * tensor.dim())
    return parts


def part_name(name: str, rank: int) -> str:
    """File name of a rank's part: `model.safetensors`, `model.00001.safetensors`."""
    stem, _, kind = name.rpartition(".")
    return name if rank == 0 else f"{stem}.{rank:05d}.{kind}"


def save_part(tensors: Named, path: Path, offsets: Offsets | None) -> None:
    """Save a part; `offsets` is None for whole tensors."""
    header = None
    if offsets is not None:
        header = {SHARDING: json.dumps({n: {BEGINS: offsets[n]} for n in tensors})}
    save_file(tensors, path, header)


def _part_files(folder: Path, name: str) -> list[Path]:
    stem, _, kind = name.rpartition(".")
    return [folder / name, *sorted(folder.glob(f"{stem}.*.{kind}"))]


def _offsets(file: Any) -> Offsets:
    try:
        known = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
        return {name: [int(n) for n in entry[BEGINS]] for name, entry in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the header of a shard is damaged: {error}") from None


def stored_shapes(folder: Path, name: str) -> Shapes:
    """Shapes of the whole tensors in the files of `name`."""
    shapes: Shapes = {}
    for path in _part_files(folder, name):
        with safe_open(path, "pt") as file:
            offsets = _offsets(file)
            for key in file.keys():
                shape = file.get_slice(key).get_shape()
                begins = offsets.get(key, [0] * len(shape))
                ends = [b + n for b, n in zip(begins, shape, strict=True)]
                shapes[key] = tuple(map(max, shapes.get(key, ends), ends))
    return shapes


def stored_types(folder: Path, name: str) -> dict[str, torch.dtype]:
    """Types of the tensors in the files of `name`."""
    found = {}
    for path in _part_files(folder, name):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                part = file.get_slice(key)
                some = part[:0] if part.get_shape() else file.get_tensor(key)
                found[key] = some.dtype
    return found


def load_whole(folder: Path, name: str) -> Named:
    """All tensors in the files of `name`; the parts of several ranks are joined."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for path in _part_files(folder, name):
        with safe_open(path, "pt") as file:
            offsets = _offsets(file)
            for key in file.keys():
                begin = offsets.get(key) or [0]
                parts.setdefault(key, []).append((begin[0], file.get_tensor(key)))
    return {name: _joined(found) for name, found in parts.items()}


def _joined(parts: Iterable[tuple[int, Tensor]]) -> Tensor:
    rows = [part for _, part in sorted(parts, key=lambda entry: entry[0])]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def read_parts(folder: Path, targets: Named, control: Any) -> None:
    """Read each rank's part of `targets` in place, from the files of any number of
    ranks. Raises CheckpointError on all ranks if one of them cannot read."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about use with one process
        try:
            load(dict(targets), storage_reader=reader, process_group=control)
        except CheckpointException as error:
            raise CheckpointError(
                f"{folder} cannot be read on all machines; sharded checkpoints need a "
                f"folder that all of them see: {error}"
            ) from None


@torch.no_grad()
def fill_own_part(target: Any, whole: Tensor) -> None:
    """Copy this rank's part of `whole`, which all ranks have, into `target`."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    placed = distribute_tensor(
        whole, target.device_mesh, target.placements, src_data_rank=None
    )
    target.to_local().copy_(placed.to_local())
