"""Compute a loss that compares all samples of a global batch, e.g. a contrastive loss.

The computation takes two passes (Gao et al. 2021). The first pass computes the logits
of all micro-batches without gradients. The ranks exchange the logits, and compute the
loss and its gradient with respect to the logits. The second pass recomputes the logits
of each micro-batch, with the same random numbers, and continues the backward pass from
these gradients. In this way, the loss compares all samples of the global batch, but
only the activations of one micro-batch are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.batches.collation import PLACE, StepBatch
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.model import GRADIENT

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function that maps logits (K, ...) and labels (K, ...) to the loss, summed over K
targets, as an fp32 scalar."""
Part = tuple[Tensor, Tensor, Tensor]
"""The logits (k, ...), labels (k, ...) and positions (k,) of targets in a batch."""


def whole(parts: Sequence[Part], count: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Combine the `parts` of all ranks. Return the logits and labels (S, ...) of a
    global batch of `count` = S targets, in order of position. Padding has the position
    S and is dropped."""
    logits, labels, places = (torch.cat(list(own)) for own in zip(*parts, strict=True))
    found = []
    for values in (logits.float(), labels):
        every = values.new_zeros(count + 1, *values.shape[1:]).index_copy(
            0, places, values
        )[:count]
        if world_size > 1:  # one rank has a position's values, the others have zeros
            torch.distributed.all_reduce(every)
        found.append(every)
    return found[0], found[1]


class CachedGradients:
    """Computes the loss of a global batch and its gradient with respect to the logits.
    Iterating over an instance yields the input for the second pass of each micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: StepBatch,
        loss: Loss,
        runtime: Runtime,
        no_sync: Callable[[], AbstractContextManager[Any]],
        draw: Callable[[], None],
    ) -> None:
        """Run the first pass. `draw` draws new dropout masks before each forward
        pass."""
        self._runtime, self._draw = runtime, draw
        self._micro_batches = batch.micro_batches
        self._states: list[list[Tensor]] = []
        parts = []
        nothing = torch.zeros((), device=runtime.device)
        with torch.no_grad(), no_sync():
            for tensors in self._micro_batches:
                self._states.append(self._random_state())
                draw()
                with runtime.autocast():
                    _, logits = module({**tensors, GRADIENT: nothing})
                parts.append((logits, tensors["labels"], tensors[PLACE]))
        ranks = runtime.ranks.world_size
        logits, labels = whole(parts, batch.num_sequences, ranks)
        logits.requires_grad_()
        with torch.enable_grad():
            found = loss(logits, labels)
        (gradient,) = torch.autograd.grad(found, logits)
        self._gradient = torch.cat([gradient, torch.zeros_like(gradient[:1])])
        self.loss = found.detach() / ranks
        """The summed loss divided by the number of ranks, as a scalar tensor."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield each micro-batch with the gradients of its logits, in the random state
        of the first pass. The resulting gradients add up to that of the global loss."""
        for tensors, state in zip(self._micro_batches, self._states, strict=True):
            torch.set_rng_state(state[0])
            if self._runtime.is_cuda:
                torch.cuda.set_rng_state(state[1], self._runtime.device)
            self._draw()
            yield {**tensors, GRADIENT: self._gradient[tensors[PLACE]]}

    def _random_state(self) -> list[Tensor]:
        device = self._runtime.device
        on_gpu = [torch.cuda.get_rng_state(device)] if self._runtime.is_cuda else []
        return [torch.get_rng_state(), *on_gpu]
