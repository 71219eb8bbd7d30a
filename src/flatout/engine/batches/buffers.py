"""Arrays of a step side by side in one buffer: handing it to another process, pinning
it and copying it to the device are one operation each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.rows.layout import Arrays, LateArray, round_up

ALIGNMENT = 64
"""Bytes; a tensor begins at a multiple of it."""
Places = list[dict[str, tuple[int, torch.dtype, tuple[int, ...]]]]
"""For each micro-batch: name -> offset in bytes, type and shape in the buffer."""


def in_one_buffer(
    parts: Sequence[Arrays], memory: Tensor | None = None
) -> tuple[Tensor, Places]:
    """All arrays copied once into a buffer (bytes,), the beginning of `memory` where
    they fit there; and where each of them lies."""
    layout, size = _places(parts)
    if memory is None or size > len(memory):
        memory = torch.empty(size, dtype=torch.uint8)
    buffer = memory[:size]
    for arrays, places in zip(parts, layout, strict=True):
        for name, array in arrays.items():
            target: Any = view(buffer, *places[name]).numpy()
            if isinstance(array, LateArray):
                array.write(target)
            else:
                target[...] = array
    return buffer, layout


def _places(parts: Sequence[Arrays]) -> tuple[Places, int]:
    layout: Places = []
    size = 0
    for arrays in parts:
        places = {}
        for name, array in arrays.items():
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
            places[name] = (size, dtype, tuple(array.shape))
            size = round_up(size + num_bytes(*places[name][1:]), ALIGNMENT)
        layout.append(places)
    return layout, size


def view(
    buffer: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """A tensor of the buffer."""
    size = num_bytes(dtype, shape)
    return buffer[offset : offset + size].view(dtype).view(shape)


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize
