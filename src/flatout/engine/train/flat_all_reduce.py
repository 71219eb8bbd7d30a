"""Sum the gradients of all ranks after the backward pass, in one buffer.

DDP reduces gradients during the backward pass. That hides a slow link, but it occupies
multiprocessors that matrix products need. With CUDA graphs, all ranks would also have
to record at the same step, although each rank meets its shapes at different steps.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Each gradient starts at a multiple of this number of elements, because kernels make
wide reads from multiples of 16 bytes."""


class FlatAllReduce:
    """A buffer that holds the gradients of `parameters`, each at a fixed address, as
    CUDA graphs require. Like DDP, it first copies rank 0's weights to all ranks. The
    gradient of an unused parameter is zero, so AdamW decays the parameter without a
    warning (DDP rejects such models)."""

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
        """Set all gradients to zero before the micro-batches add to them."""
        self._buffer.zero_()
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.grad = part

    def __call__(self) -> None:
        """Replace each gradient by its sum over all ranks."""
        torch.distributed.all_reduce(self._buffer)
