"""Gradients of all ranks added up behind the backward pass, in one piece.

DDP reduces in the middle of it: that hides a slow link, but takes multiprocessors
from matrix products, and a CUDA graph of it would have to be recorded by all ranks at
the same step, where each meets its shapes at steps of its own.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Elements; kernels read wide from places that are a multiple of 16 bytes."""


class FlatAllReduce:
    """One buffer that holds the gradients of `parameters`, each in a place of its own
    for good, so that graphs find them there. Starts from rank 0's weights, as DDP. A
    parameter that takes no part has a gradient of zero: AdamW decays it, nobody sees it
    (DDP refuses such models)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        first = parameters[0]
        places = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
        self._buffer = torch.zeros(sum(places), dtype=first.dtype, device=first.device)
        self._parts = [
            part[: p.numel()].view_as(p)
            for part, p in zip(
                torch.split(self._buffer, places), parameters, strict=True
            )
        ]
        for parameter in parameters:
            torch.distributed.broadcast(parameter.detach(), src=0)

    def clear(self) -> None:
        """All gradients zero, to be added to by each micro-batch."""
        self._buffer.zero_()
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.grad = part

    def __call__(self) -> None:
        """Each gradient becomes its sum over the ranks."""
        torch.distributed.all_reduce(self._buffer)
