"""Compute a loss that compares all samples of a global batch split over devices.

This takes two passes (Gao et al. 2021). The first pass computes the logits of all
micro-batches without gradients. The ranks exchange them, and the loss gives the
gradient of each logit. The second pass computes the logits of each micro-batch again,
with the same random numbers, and runs the backward pass from that gradient. In this
way, the loss compares the whole global batch, but only the activations of one
micro-batch are in memory.
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
"""A function that returns the summed loss, an fp32 scalar, of logits (K, ...) and
labels (K, ...)."""
Part = tuple[Tensor, Tensor, Tensor]
"""Logits (k, ...), labels (k, ...) and their positions (k,) in the global batch."""


def whole(parts: Sequence[Part], count: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the logits and labels (S, ...) of the `count` targets of a global batch,
    in order, from the parts of all ranks. Padding has the position after the last."""
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
    """The loss of a global batch, and the gradients from which the backward pass of
    each micro-batch starts."""

    def __init__(
        self,
        module: nn.Module,
        batch: StepBatch,
        loss: Loss,
        runtime: Runtime,
        no_sync: Callable[[], AbstractContextManager[Any]],
        draw: Callable[[], None],
    ) -> None:
        """`draw` draws new random numbers for the next pass."""
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
        """This rank's share of the summed loss, a scalar tensor."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each micro-batch with the gradients of its logits. The
        backward passes then add up to the gradient of the global loss. The random
        numbers are those of the first pass."""
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
