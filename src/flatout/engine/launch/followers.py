"""Ranks that somebody else's launcher started, where only rank 0 runs the project.

They wait at the launcher's own store until rank 0 trains, become ranks of that
training, and end. Where rank 0 trains nothing, it sends them home.
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
    """On rank 0: what all ranks train now."""
    global _called  # noqa: PLW0603 - once a process, as the store's key is
    _called = True
    _store().set(KEY, spec)


def release_followers() -> None:
    """On rank 0, at its end: no training comes any more."""
    if not _called:
        call_followers(NOTHING)


def follow() -> None:
    """On any other rank: wait, then become a rank of the training. Does not return
    where there is one."""
    store = _store()
    store.set_timeout(LONGEST_WAIT)
    spec = store.get(KEY).decode()
    if spec == NOTHING:
        return
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    path = folder / "spec.json"
    path.touch(mode=0o600)
    path.write_text(spec, encoding="utf-8")
    # A new program in this process: variables for MKL and OpenMP come before torch.
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
