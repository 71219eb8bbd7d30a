"""Ranks started by an external launcher, of which only rank 0 runs the project.

They wait at the launcher's store until rank 0 trains, become ranks of that training,
and end. If rank 0 does not train, it ends them.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from flatout.engine.machine import environment

logger = logging.getLogger(__name__)

KEY = "flatout/spec"
NOTHING = "nothing to train"
LONGEST_WAIT = timedelta(days=30)
_called = False


def call_followers(spec: str) -> None:
    """Publish, on rank 0, the training that all ranks join."""
    global _called  # noqa: PLW0603 - once per process, like the store's key
    _called = True
    _store().set(KEY, spec)


def release_followers() -> None:
    """End the other ranks, on rank 0, when it ends: no training follows."""
    if not _called:
        call_followers(NOTHING)


def follow() -> None:
    """Wait, on any other rank, then become a rank of the training. Returns only if
    there is no training."""
    store = _store()
    store.set_timeout(LONGEST_WAIT)
    spec = store.get(KEY).decode()
    if spec == NOTHING:
        return
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    path = folder / "spec.json"
    path.touch(mode=0o600)
    path.write_text(spec, encoding="utf-8")
    # A new program in this process: variables for MKL and OpenMP must precede torch.
    command = [
        sys.executable,
        "-m",
        "flatout.engine.launch.rank",
        str(folder),
        "--alone",
    ]
    os.execve(sys.executable, command, environment.rank_environment())  # noqa: S606


def _store() -> Any:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    ranks = environment.current_ranks()
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size))
    return PrefixStore("flatout", store)
