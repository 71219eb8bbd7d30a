"""Upload checkpoints to a mirror in the background, and download the newest one.

The file OWNER in the mirror identifies the run that writes to it. A new machine can
replace the file to take over from a lost one. The earlier run then stops uploading.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flatout.engine.checkpoints.checkpoint_folder import MANIFEST, Checkpoint, Manifest
from flatout.engine.checkpoints.resume import find_checkpoint, identity_faults, remedy
from flatout.engine.files.atomic_write import hidden_path, remove
from flatout.engine.files.mirror import DamagedCopyError, Mirror, MirrorError
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)

PARAMETER = "train.checkpoint.mirror"
OWNER = "owner.json"
STEP, BEST = "step-", "best-"
END_S = 60.0
"""The number of seconds for which failed uploads are retried at the end of a run."""
LONGEST_PAUSE_S = 30.0
POLL_S = 0.2


class CheckpointMirror:
    """Uploads the newest checkpoint whenever the previous upload has ended, in a
    background thread. Failed uploads are retried and never stop the training run."""

    def __init__(self, url: str, folder: Path, keep: int) -> None:
        """Mirror the checkpoints in `folder` to `url`, where the newest `keep` copies
        are kept."""
        self._mirror = Mirror(url, PARAMETER)
        self._folder, self._keep = folder, keep
        self._run = uuid.uuid4().hex
        self._turn = threading.Condition()
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._failing_s: float | None = None
        self._reason = ""

    def claim(self, identity: dict[str, Any], step: int) -> None:
        """Make this run the owner of the mirror. Remove incomplete copies, and copies
        of steps after `step`, at which the run begins. Raises MirrorError if the mirror
        belongs to a run with a different `identity` (settings and data)."""
        check_owner(self._mirror, identity)
        self._mirror.with_retries(lambda: self._claim(identity, step))

    def _claim(self, identity: dict[str, Any], step: int) -> None:
        owner = {"run": self._run, "host": socket.gethostname(), "identity": identity}
        self._mirror.write(OWNER, json.dumps(owner))
        for name, complete in self._mirror.copies().items():
            is_ours = name.startswith((STEP, BEST))
            if is_ours and not (complete and int(name[len(STEP) :]) <= step):
                self._mirror.remove(name)

    def offer(self, checkpoint: Checkpoint) -> None:
        """Queue a complete checkpoint and its best model for upload. A checkpoint that
        is still waiting in the queue is replaced."""
        # Use hard links, which remain valid when old checkpoints are removed.
        linked = hidden_path(self._folder / "mirror")
        try:
            for name in filter(
                None, (checkpoint.manifest.best, checkpoint.folder.name)
            ):
                source = self._folder / name
                shutil.copytree(source, linked / name, copy_function=_link_or_copy)
        except OSError as error:
            self._note(error)
            remove(linked)
            return
        with self._turn:
            replaced, self._waiting = self._waiting, linked
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._turn.notify()
        if replaced is not None:
            remove(replaced)

    def wait(self, beat: Callable[[], None]) -> str:
        """Wait until all uploads have ended, calling `beat` repeatedly. Return an empty
        string if the newest checkpoint was uploaded, else the reason why it was not. If
        uploads keep failing, give up after END_S seconds."""
        begin_s = time.monotonic()
        with self._turn:
            self._turn.notify()
        while self._thread is not None:
            beat()
            failing_s = self._failing_s
            if failing_s and time.monotonic() - max(begin_s, failing_s) > END_S:
                break
            time.sleep(POLL_S)
        lacks = f"{self._mirror.shown} lacks the newest checkpoint"
        return self._reason and f"{lacks} ({self._reason})"

    def _work(self) -> None:
        while True:
            with self._turn:
                linked, self._waiting = self._waiting, None
                if linked is None:
                    self._thread = None
                    return
            try:
                self._deliver(linked)
            finally:
                remove(linked)

    def _deliver(self, linked: Path) -> None:
        """Upload the folder `linked`. Retry failed uploads until one succeeds, a newer
        checkpoint is queued, or another run has taken over the mirror."""
        pause_s = 1.0
        while self._waiting is None:
            try:
                self._upload(linked)
                self._failing_s, self._reason = None, ""
                return
            except MirrorError as error:  # another run has taken over the mirror
                self._note(error)
                return
            except Exception as error:  # each kind of store raises its own errors
                self._failing_s = self._failing_s or time.monotonic()
                self._note(error)
            with self._turn:
                self._turn.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _note(self, error: Exception) -> None:
        """Log the reason for a failed upload, unless it equals the previous reason."""
        if self._reason != (reason := first_line(error)):
            self._reason = reason
            text = "%s: no upload to %s (%s); the training continues"
            logger.warning(text, PARAMETER, self._mirror.shown, reason)

    def _upload(self, linked: Path) -> None:
        self._check_mine()
        present = self._mirror.copies()
        for folder in sorted(linked.iterdir()):  # the best model first
            if not present.get(folder.name):
                self._mirror.upload(folder, folder.name, self._check_mine)
        self._prune()

    def _check_mine(self) -> None:
        owner = self._mirror.read_json(OWNER)
        if owner.get("run") != self._run:
            raise MirrorError(
                f"a run on {owner.get('host')} is using it: give each run its own URL"
            )

    def _prune(self) -> None:
        """Remove old checkpoints, and best models that no kept checkpoint refers to."""
        names = self._mirror.copies()
        kept = _steps(names)[-self._keep :]
        wanted = {*kept}
        for name in kept:
            with suppress(DamagedCopyError):
                wanted.add(_manifest(self._mirror, name).best or name)
        for name in names:
            if name.startswith((STEP, BEST)) and name not in wanted:
                self._mirror.remove(name)


def _steps(copies: dict[str, bool]) -> list[str]:
    """Return the names of the complete checkpoints, oldest first."""
    return [n for n, complete in copies.items() if complete and n.startswith(STEP)]


def _manifest(mirror: Mirror, name: str) -> Manifest:
    """Read the manifest of a copy. Raises DamagedCopyError if it is damaged."""
    try:
        return Manifest.parse(mirror.read(f"{name}/{MANIFEST}") or "")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCopyError(f"{mirror.shown}/{name}/{MANIFEST}: {error}") from error


def fetch_newest(url: str, folder: Path, identity: dict[str, Any]) -> None:
    """Download the newest valid checkpoint to `folder`, unless `folder` has that
    checkpoint or a newer one. Raises MirrorError if the mirror belongs to a run with
    another `identity`."""
    mirror = Mirror(url, PARAMETER)
    check_owner(mirror, identity)
    local = find_checkpoint("auto", folder)
    if not (names := _steps(mirror.with_retries(mirror.copies))):
        logger.info("%s has no checkpoint yet", mirror.shown)
    for name in reversed(names):
        if local is not None and name <= local.folder.name:
            return
        try:
            _fetch(mirror, name, folder)
        except DamagedCopyError as error:
            logger.warning("checkpoint skipped: %s", error)
            continue
        logger.info("%s was downloaded from %s", name, mirror.shown)
        return


def _fetch(mirror: Mirror, name: str, folder: Path) -> None:
    """Download the checkpoint `name`, after the best model that it refers to."""
    best = mirror.with_retries(lambda: _manifest(mirror, name)).best
    if best and mirror.with_retries(mirror.copies).get(best):
        mirror.with_retries(partial(mirror.download, best, folder / best))
    mirror.with_retries(partial(mirror.download, name, folder / name))


def check_owner(mirror: Mirror, identity: dict[str, Any]) -> None:
    """Raise MirrorError if the mirror belongs to a run with another `identity`."""
    owner = mirror.with_retries(lambda: mirror.read_json(OWNER)).get("identity")
    if owner and (faults := identity_faults(owner, identity)):
        raise MirrorError(
            f"{mirror.shown} has checkpoints of another training (then -> now): "
            f"{'; '.join(faults)}. {remedy(owner, identity)}, or set {PARAMETER} to "
            "another URL"
        )


def _link_or_copy(source: str, target: str) -> None:
    with suppress(OSError):  # the file system does not support hard links
        os.link(source, target)
        return
    shutil.copy2(source, target)
