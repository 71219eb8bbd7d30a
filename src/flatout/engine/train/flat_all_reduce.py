"""Sum the gradients over ranks after the backward pass, in a single all-reduce.

DDP reduces gradients during the backward pass. This hides the latency of a slow
interconnect, but occupies multiprocessors that matmuls need. In addition, all ranks
would have to capture CUDA graphs at the same step, but new shapes occur at different
steps on different ranks.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNMENT = 64
"""Each gradient starts at a multiple of this number of elements, because kernels with
vectorised loads need 16-byte alignment."""


class FlatAllReduce:
    """A single buffer for the gradients of all `parameters`, whose addresses never
    change, as CUDA graphs require. The constructor broadcasts the weights of rank 0, as
    DDP does. Unused parameters get zero gradients, so AdamW decays them."""

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
