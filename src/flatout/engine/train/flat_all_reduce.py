"""Sum of all ranks' gradients after the backward pass, in one buffer.

DDP reduces during the backward pass: that hides a slow link, but uses multiprocessors
that matrix products need, and all ranks would have to record its CUDA graph at the same
step, although each meets its shapes at different steps.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Number of elements; kernels read wide from multiples of 16 bytes."""


class FlatAllReduce:
    """One buffer with the gradients of `parameters`, each at a fixed address for
    graphs. Starts from rank 0's weights, like DDP. A parameter that is not used has a
    gradient of zero: AdamW decays it without a warning (DDP refuses such models)."""

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
        """Set all gradients to zero, before the micro-batches add to them."""
        self._buffer.zero_()
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.grad = part

    def __call__(self) -> None:
        """Replace each gradient by its sum over the ranks."""
        torch.distributed.all_reduce(self._buffer)
