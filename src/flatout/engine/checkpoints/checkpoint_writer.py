"""Write checkpoints in a background thread, one at a time and in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from flatout.engine.checkpoints.checkpoint_folder import (
    Checkpoint,
    Manifest,
    prune,
    write_checkpoint,
)
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints in a background thread. If a write fails (e.g. on a full
    disk), the run logs a warning and continues. Earlier checkpoints are kept."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        sealed: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        """Keep the newest `keep` checkpoints in `folder`. `sealed` is called with each
        checkpoint after it has been written."""
        self._folder = folder
        self._sealed = sealed
        self._keep = keep
        self._thread: threading.Thread | None = None
        self.newest: Checkpoint | None = None
        self.faults: list[str] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[Path], list[str]], manifest: Manifest) -> None:
        """Start to write a checkpoint. `write` writes the files to a given folder and
        returns their names. If the previous checkpoint is still being written, wait for
        it first, because both use the same memory."""
        self.wait()
        # On a second Ctrl-C, the process exits without waiting for a daemon thread.
        self._thread = threading.Thread(
            target=self._write,
            args=(write, manifest),
            name="flatout-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until the current write is complete."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, write: Callable[[Path], list[str]], manifest: Manifest) -> None:
        step = manifest.step
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.newest = write_checkpoint(self._folder, manifest, write)
            self._sealed(self.newest)
        except Exception as error:  # a disk error, or a state that must not be saved
            reason = first_line(error)
            older = self.newest.folder if self.newest else "none"
            self._warn(
                f"the checkpoint of step {step} was not saved ({reason}); training "
                f"continues, the newest one is {older}"
            )
            return
        try:
            prune(self._folder, self._keep, manifest.best)
        except OSError as error:
            self._warn(
                f"the checkpoint of step {step} was saved, but older ones could not be "
                f"removed ({error}) and still use disk space"
            )

    def _warn(self, fault: str) -> None:
        self.faults.append(fault)
        logger.warning(fault)
