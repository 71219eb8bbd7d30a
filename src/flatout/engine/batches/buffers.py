"""Store all arrays of a step in one buffer. The whole step can then be sent to another
process, pinned, or copied to the device in a single operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.rows.layout import Arrays, LateArray, round_up

ALIGNMENT = 64
"""The offset of each tensor in the buffer is a multiple of this number of bytes."""
Shapes = tuple[tuple[tuple[str, str, tuple[int, ...]], ...], ...]
"""The name, dtype and shape of each tensor in the buffer, per micro-batch."""
Place = tuple[int, int, torch.dtype, tuple[int, ...]]
"""A tensor's first byte in the buffer, its end byte (exclusive), dtype and shape."""


def in_one_buffer(
    parts: Sequence[Arrays], memory: Tensor | None = None
) -> tuple[Tensor, Shapes]:
    """Copy the arrays of all micro-batches into one buffer (bytes,). Return the buffer
    and the shapes that `views` needs to find the arrays in it. The buffer is the start
    of `memory` if this is given and large enough. Otherwise, it is newly allocated."""
    shapes = tuple(
        tuple((n, np.dtype(a.dtype).str, tuple(a.shape)) for n, a in arrays.items())
        for arrays in parts
    )
    size, found = places(shapes)
    if memory is None or size > len(memory):
        memory = torch.from_numpy(np.empty(size, np.uint8))
    buffer = memory[:size]
    whole = buffer.numpy()
    for arrays, own in zip(parts, found, strict=True):
        for name, array in arrays.items():
            begin, end, _, shape = own[name]
            target: Any = whole[begin:end].view(array.dtype).reshape(shape)
            if isinstance(array, LateArray):
                array.write(target)
            else:
                target[...] = array
    return buffer, shapes


@lru_cache(maxsize=1_024)
def places(shapes: Shapes) -> tuple[int, list[dict[str, Place]]]:
    """Return the buffer size in bytes, and the `Place` of each tensor per
    micro-batch."""
    found, size = [], 0
    for part in shapes:
        own: dict[str, Place] = {}
        for name, dtype, shape in part:
            end = size + math.prod(shape) * np.dtype(dtype).itemsize
            own[name] = (size, end, _torch_type(dtype), shape)
            size = round_up(end, ALIGNMENT)
        found.append(own)
    return size, found


@cache
def _torch_type(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def views(buffer: Tensor, shapes: Shapes) -> list[dict[str, Tensor]]:
    """Return each micro-batch's tensors by name, as views of `buffer` (bytes,)."""
    return [
        {
            name: buffer[begin:end].view(dtype).view(shape)
            for name, (begin, end, dtype, shape) in part.items()
        }
        for part in places(shapes)[1]
    ]
