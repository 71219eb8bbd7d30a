"""Sum the gradients of all ranks after the backward pass, with a single all-reduce.

DDP reduces gradients during the backward pass. This hides the latency of a slow
interconnect, but it occupies multiprocessors that matmuls need. With DDP, all ranks
would also have to capture CUDA graphs at the same step, although each rank encounters
new shapes at different steps.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Each gradient starts at a multiple of this number of elements, because vectorised
loads in kernels need 16-byte alignment."""


class FlatAllReduce:
    """A buffer for the gradients of `parameters`, in which each gradient has a fixed
    address, as CUDA graphs require. Like DDP, the constructor broadcasts the weights of
    rank 0. Unused parameters get zero gradients, so AdamW decays them without a warning
    (DDP rejects models with unused parameters)."""

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
        """Replace each gradient with its sum over all ranks."""
        torch.distributed.all_reduce(self._buffer)
