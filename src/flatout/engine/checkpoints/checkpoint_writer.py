"""Write checkpoints in a background thread, one at a time and in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flatout.engine.checkpoints.checkpoint_folder import (
    Checkpoint,
    Manifest,
    prune,
    write_checkpoint,
)
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)


@dataclass
class CheckpointWriter:
    """Writes checkpoints to `folder` in a background thread, and keeps the newest
    `keep` of them. If a write fails (e.g. on a full disk), a warning is logged and the
    run continues. `sealed` is called with each checkpoint that has been written."""

    folder: Path
    keep: int
    sealed: Callable[[Checkpoint], None] = lambda _: None
    newest: Checkpoint | None = None
    faults: list[str] = field(default_factory=list)
    _thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[Path], list[str]], manifest: Manifest) -> None:
        """Start to write a checkpoint. `write` writes the files to a given folder and
        returns their names. If the previous checkpoint is still being written, wait for
        it first, because both use the same memory."""
        self.wait()
        # On a second Ctrl-C, the process exits without waiting for a daemon thread.
        work = partial(self._write, write, manifest)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the current write is complete."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, write: Callable[[Path], list[str]], manifest: Manifest) -> None:
        step = manifest.step
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.newest = write_checkpoint(self.folder, manifest, write)
            self.sealed(self.newest)
        except Exception as error:  # a disk error, or a state that must not be saved
            reason = first_line(error)
            older = self.newest.folder if self.newest else "none"
            self._warn(
                f"the checkpoint of step {step} was not saved ({reason}); training "
                f"continues, the newest one is {older}"
            )
            return
        try:
            prune(self.folder, self.keep, manifest.best)
        except OSError as error:
            self._warn(
                f"the checkpoint of step {step} was saved, but older ones could not be "
                f"removed ({error}) and still use disk space"
            )

    def _warn(self, fault: str) -> None:
        self.faults.append(fault)
        logger.warning(fault)
