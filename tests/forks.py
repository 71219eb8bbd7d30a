"""Two ranks that fork from a test: they import nothing anew."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState

from tests.golden.engine import (
    DistributedSettings,
    ProcessGroup,
    RuntimeSettings,
    set_up,
)


def fork_two(work: Callable[..., None], *arguments: Any, strategy: str = "ddp") -> None:
    """`work(runtime, group, *arguments)` in two ranks of one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=_join, args=(rank, port, strategy, work, arguments), daemon=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(250)
    assert [process.exitcode for process in ranks] == [0, 0]


def _join(rank: int, port: int, strategy: str, work: Any, arguments: Any) -> None:
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (named | place).items()})
    # What Accelerate learnt in the process that was forked: one rank, no DDP.
    AcceleratorState._reset_state(reset_partial_state=True)
    runtime = set_up(RuntimeSettings(precision="fp32", threads=1))
    group = ProcessGroup.join(DistributedSettings(strategy=strategy), runtime)
    work(runtime, group, *arguments)
    group.leave()
