"""Writes checkpoints beside the training: one at a time, the newest last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from flatout.engine.jobs.checkpoint import Snapshot
from flatout.engine.jobs.checkpoint_folder import (
    Checkpoint,
    Manifest,
    prune,
    write_checkpoint,
)

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """A thread a checkpoint. A disk that is full or gone costs checkpoints and a
    warning each, not the run; older checkpoints stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread: threading.Thread | None = None
        self.newest: Checkpoint | None = None
        self.faults: list[str] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Begin to write. The one before must have ended: they share their memory."""
        self.wait()
        # A daemon: a second Ctrl-C does not wait for the disk.
        self._thread = threading.Thread(
            target=self._guarded,
            args=(lambda: self._write(snapshot, manifest), manifest.step),
            name="flatout-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, manifest: Manifest) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.newest = write_checkpoint(self._folder, manifest, snapshot.write)
        try:
            prune(self._folder, self._keep, manifest.best)
        except OSError as error:
            self._tell(
                f"the checkpoint of step {manifest.step} was saved, but older ones "
                f"could not be removed ({error}): they take room until they are"
            )

    def _guarded(self, write: Callable[[], None], step: int) -> None:
        try:
            write()
        except Exception as error:  # of the disk, or of a state that must not be saved
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            older = self.newest.folder if self.newest else "none"
            self._tell(
                f"the checkpoint of step {step} was not saved ({reason}); training "
                f"goes on, the newest one is {older}"
            )

    def _tell(self, fault: str) -> None:
        self.faults.append(fault)
        logger.warning(fault)
