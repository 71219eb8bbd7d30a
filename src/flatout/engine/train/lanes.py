"""Micro-batches of one step that run side by side on a CPU, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.engine.machine.threads import Found, Given, Threads
from flatout.engine.ops.dropout import drawing_from


@dataclass(frozen=True)
class Passes:
    """What forward and backward passes came to."""

    loss: Tensor
    """() summed over targets."""
    gradients: Sequence[Tensor | None]
    judged: list[tuple[Tensor, Tensor]]
    """Logits (K, ...) with labels (K, ...)."""

    def __add__(self, other: Passes) -> Passes:
        pairs = zip(self.gradients, other.gradients, strict=True)
        return Passes(
            self.loss + other.loss,
            [_sum(*pair) for pair in pairs],
            self.judged + other.judged,
        )


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """In a tensor of its own: two gradients of one pass may be one tensor."""
    if one is not None and other is not None:
        return one + other
    alone = other if one is None else one
    return None if alone is None else alone.clone()


class Lanes:
    """`count` threads, each of which draws from a generator of its own."""

    def __init__(self, count: int) -> None:
        self._threads = Threads(count)
        self._generators = [torch.Generator() for _ in range(count)]

    def run(
        self, work: Callable[[Given], Found], given: Sequence[Given]
    ) -> list[Found]:
        """`work` of each of `given`, at most `count`; in their order. What they draw
        does not depend on which is first, and goes on from this thread's generator.
        Raises the first error, once all have ended."""
        seeds = torch.randint(2**62, (len(given),)).tolist()

        def lane(index: int) -> Found:
            generator = self._generators[index]
            with drawing_from(generator.manual_seed(seeds[index])):
                return work(given[index])

        return self._threads.run(lane, range(len(given)))
