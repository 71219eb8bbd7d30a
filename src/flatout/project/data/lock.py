"""Lock for the data folder. Without the lock, a second run could replace the tokens
during a training run. The model would then be evaluated on different tokens."""

from __future__ import annotations

import logging
from pathlib import Path

from filelock import FileLock, Timeout
from kedro.pipeline import Pipeline

from flatout.engine.parameters import SettingsError

logger = logging.getLogger(__name__)

GUARDED = frozenset({"split", "tokenize", "arrays", "images", "train", "evaluate"})
"""Pipelines that lock the data folder, because their results depend on one another."""
WAIT_S = 1.0


class DataLock:
    """Lock on a data folder, held while a run creates rows, trains or evaluates."""

    _lock: FileLock | None = None

    def take(self, folder: Path) -> None:
        """Lock `folder`. Raises SettingsError if another run has locked it."""
        lock = FileLock(folder / ".lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=WAIT_S)
        except Timeout:
            raise SettingsError(
                f"another run works in {folder}: wait for its end, or give this one "
                "another folder (--params=data_dir=...)"
            ) from None
        except (OSError, NotImplementedError) as error:
            logger.debug("%s cannot be locked: %s", folder, error)
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def changes_data(pipeline: Pipeline) -> bool:
    """Return whether the pipeline has nodes that need the data folder to be locked."""
    return any(node.namespace in GUARDED for node in pipeline.nodes)
