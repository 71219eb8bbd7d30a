"""Threads of this process that compute side by side, each of its operators alone.

Threads that share a small operator wait for each other behind each one: on free cores
they may gain, beside other programs they fall to a seventh of one thread's rate. Longer
work of each waits less. PyTorch gives Python's lock up inside of its
operators, and a backward pass runs in the thread that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Given = TypeVar("Given")
Found = TypeVar("Found")


class Threads:
    """`count` of them, this one included. All of this process's operators have one
    thread from here on: an evaluation or an update of such a model is slower by several
    too."""

    def __init__(self, count: int) -> None:
        torch.set_num_threads(1)
        self.count = count
        self._others = ThreadPoolExecutor(
            count, "beside", initializer=torch.set_num_threads, initargs=(1,)
        )

    def run(
        self, work: Callable[[Given], Found], given: Sequence[Given]
    ) -> list[Found]:
        """`work` of each of `given`, at most `count`; in their order. The others begin
        with PyTorch's defaults: gradients on, no autocast. Raises the first error, once
        all have ended."""
        others = [self._others.submit(work, one) for one in given[1:]]
        try:
            own = work(given[0])
        finally:
            for other in others:
                other.exception()  # waits
        return [own, *(other.result() for other in others)]
