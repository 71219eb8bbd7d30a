"""Store all arrays of a step in one buffer. A single operation can then send it to
another process, pin it, or copy it to the device."""

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
"""Alignment of each tensor's first byte, in bytes."""
Shapes = tuple[tuple[tuple[str, str, tuple[int, ...]], ...], ...]
"""The name, dtype and shape of each tensor in the buffer, per micro-batch."""
Place = tuple[int, int, torch.dtype, tuple[int, ...]]
"""The first byte, end byte (exclusive), dtype and shape of a tensor in the buffer."""


def in_one_buffer(
    parts: Sequence[Arrays], memory: Tensor | None = None
) -> tuple[Tensor, Shapes]:
    """Copy the arrays of all micro-batches into one buffer (bytes,), and return it with
    its layout. If `memory` is large enough, its start is used as the buffer."""
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
    """Return the buffer size in bytes, and the place of each tensor per micro-batch."""
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
    """Return views of the tensors of each micro-batch in the buffer (bytes,)."""
    return [
        {
            name: buffer[begin:end].view(dtype).view(shape)
            for name, (begin, end, dtype, shape) in part.items()
        }
        for part in places(shapes)[1]
    ]
