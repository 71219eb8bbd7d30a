"""One run at a time changes a data folder: tokens that are replaced below a training
would be judged as those that it was given."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline

from flatout.engine.machine.environment import current_ranks
from flatout.engine.parameters import SettingsError
from flatout.project.parameters.hooks import checked_settings

logger = logging.getLogger(__name__)

GUARDED = frozenset({"split", "tokenize", "arrays", "images", "train", "evaluate"})
"""Pipelines whose results belong together."""
WAIT_S = 1.0


class DataLockHooks:
    """Holds the lock of the data folder while a run makes rows, trains or evaluates."""

    _lock: FileLock | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        settings = checked_settings(context)
        self._folder = Path(context.project_path, settings.data_dir or "data")
        first = settings.train.distributed.machine_rank == 0
        self._is_main = first and current_ranks().is_main

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        """Raises SettingsError if another run has the folder."""
        self._release()
        modules = {node.func.__module__ for node in pipeline.nodes}
        if self._is_main and modules & {
            f"flatout.pipelines.{n}.nodes" for n in GUARDED
        }:
            self._take()

    @hook_impl
    def after_pipeline_run(self) -> None:
        self._release()

    @hook_impl
    def on_pipeline_error(self) -> None:
        self._release()

    def _take(self) -> None:
        lock, holder = FileLock(self._folder / ".lock"), self._folder / ".lock.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=WAIT_S)
            holder.write_text(_who(), encoding="utf-8")
        except Timeout:
            told = holder.read_text(encoding="utf-8") if holder.is_file() else "a run"
            raise SettingsError(
                f"another run works in {self._folder} ({told}): wait for its end, or "
                "give this one a folder of its own (--params=data_dir=...)"
            ) from None
        except (OSError, NotImplementedError) as error:
            logger.debug("%s cannot be locked: %s", self._folder, error)
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _who() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{command}, process {os.getpid()}, since {time.strftime('%H:%M:%S')}"
