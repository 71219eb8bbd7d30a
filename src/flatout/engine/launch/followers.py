"""Coordinate ranks started by an external launcher, where only rank 0 runs the project.

The other ranks wait on the launcher's store until rank 0 starts training. Then they
join the run, and exit when it ends. If rank 0 ends without training, they exit too.
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
    """Tell the waiting ranks to join the run of `spec`, the text of a spec.json."""
    global _called  # noqa: PLW0603 - once per process, like the store's key
    _called = True
    _store().set(KEY, spec)


def release_followers() -> None:
    """Let the waiting ranks exit when rank 0 ends without having started a run."""
    if not _called:
        call_followers(NOTHING)


def follow() -> None:
    """Wait until rank 0 starts training, then replace this process with a rank of the
    run. The function returns only if rank 0 ends without training."""
    store = _store()
    store.set_timeout(LONGEST_WAIT)
    spec = store.get(KEY).decode()
    if spec == NOTHING:
        return
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))  # only this user can read it
    (folder / "spec.json").write_text(spec, encoding="utf-8")
    # Replace this process, because MKL and OpenMP variables must be set before
    # importing torch.
    module = ("-m", "flatout.engine.launch.rank")
    command = [sys.executable, *module, str(folder), "--alone"]
    os.execve(sys.executable, command, environment.rank_environment())  # noqa: S606


def _store() -> Any:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    ranks = environment.current_ranks()
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size))
    return PrefixStore("flatout", store)
