"""One run at a time changes a data folder: tokens that are replaced below a training
would be judged as those that it was given."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout
from kedro.pipeline import Pipeline

from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)

GUARDED = frozenset({"split", "tokenize", "arrays", "images", "train", "evaluate"})
"""Pipelines whose results belong together."""
WAIT_S = 1.0


class DataLock:
    """Of the data folder, while a run makes rows, trains or evaluates."""

    _lock: FileLock | None = None

    def take(self, folder: Path) -> None:
        """Raises SettingsError if another run has the folder."""
        lock, holder = FileLock(folder / ".lock"), folder / ".lock.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=WAIT_S)
            holder.write_text(_who(), encoding="utf-8")
        except Timeout:
            told = holder.read_text(encoding="utf-8") if holder.is_file() else "a run"
            raise SettingsError(
                f"another run works in {folder} ({told}): wait for its end, or "
                "give this one a folder of its own (--params=data_dir=...)"
            ) from None
        except (OSError, NotImplementedError) as error:
            logger.debug("%s cannot be locked: %s", folder, error)
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def changes_data(pipeline: Pipeline) -> bool:
    """Whether the pipeline changes or judges what others make."""
    return any(node.namespace in GUARDED for node in pipeline.nodes)


def _who() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{command}, process {os.getpid()}, since {time.strftime('%H:%M:%S')}"
