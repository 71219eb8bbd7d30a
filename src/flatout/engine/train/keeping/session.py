"""Resume a run, save its checkpoints, and stop it if a signal arrives."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from filelock import FileLock, Timeout

from flatout.engine.checkpoints.checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Manifest,
    best_folder,
    clear_all_leftovers,
    prune,
)
from flatout.engine.checkpoints.checkpoint_mirror import CheckpointMirror
from flatout.engine.checkpoints.checkpoint_writer import CheckpointWriter
from flatout.engine.checkpoints.resume import resume_from, resume_line
from flatout.engine.files.mirror import MirrorError
from flatout.engine.machine.signals import Interrupted, StopSignals
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.train.keeping.saved_model import SaveError, load_weights, save_model
from flatout.engine.train.keeping.snapshots import Snapshots, restore
from flatout.engine.train.process_group import Agreement, ProcessGroup, broadcast
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.recording.report import Evaluation
from flatout.engine.train.recording.summary import versions
from flatout.engine.train.recording.timing import compile_clock
from flatout.engine.train.setup.acceleration import checkpoint_values
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.setup.identity import identity

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
"""How long to wait for the lock. Ranks of a failed attempt may still be exiting."""
FIRST_MINUTES = 1.0
"""The maximum time until the first checkpoint, so that an early kill costs little."""


class Session:
    """Context manager for a training run on this rank. It locks the run's folder,
    handles signals and saves checkpoints."""

    def __init__(
        self, trainer: Trainer, recorder: Recorder, group: ProcessGroup | None
    ) -> None:
        settings = trainer.job.settings.train
        self.trainer = trainer
        self.recorder = recorder
        self.folder = trainer.job.work_folder
        self.last_model = self.folder / "last"
        self._ranks = trainer.runtime.ranks
        self._control = group.control if group else None
        self._settings = settings
        self._identity = identity(trainer.job)
        self._lock = FileLock(self.folder / ".lock")
        self._signals = StopSignals()
        self._snapshots = Snapshots(trainer, recorder, self._control)
        url = settings.checkpoint.mirror if self._ranks.is_main else None
        keep = settings.checkpoint.keep
        self._mirror = CheckpointMirror(url, self.folder, keep) if url else None
        sealed = self._mirror.offer if self._mirror else lambda _: None
        self._writer = CheckpointWriter(self.folder, keep, sealed)
        every = settings.checkpoint.every_steps
        self._agreement = Agreement(self._ranks, self._control, every)
        self._faults: list[str] = []
        self._first_step = self._saved_step = 0
        self._saved_s = time.monotonic()

    def __enter__(self) -> Session:
        if self._ranks.is_main:
            self._claim_folder()
        self._signals.__enter__()
        heartbeat.is_compiling = lambda: compile_clock.running
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._writer.wait()
        self._wait_for_mirror()
        (self._report_saved if kind is None else self._note_saved)()
        self._lock.release()
        self._signals.__exit__()
        if kind is None and self._signals.received:
            # The run is complete and saved, but the process must still exit.
            raise Interrupted(self._signals.received, "stopped after the last step")

    def resume(self) -> int:
        """Restore the checkpoint to resume, if any. Return the next step. Raises
        CheckpointError if the checkpoint cannot be used."""
        found = self._find()
        step = 0
        if broadcast(found is not None, self._control):
            step = restore(found, self.trainer, self.recorder, self._control)
            self._check_best()
        if found is not None:
            self._writer.newest = found
            self._note_saved()
            logger.info(resume_line(found))
        self._first_step = self._saved_step = step
        heartbeat.enter("train")
        return step

    def step_done(self, done: int) -> None:
        """Send a heartbeat, and save a checkpoint if one is due. If a rank has received
        a signal, raise Interrupted on all ranks at the same step."""
        heartbeat.beat(done)
        if done == self._first_step + 1 and self.trainer.runtime.is_cuda:
            self._snapshots.take()  # allocates pinned host memory during warm-up
        if not self._agreement.is_due(done):
            return
        stop, save = self._agreement.reach(
            done, self._signals.received or 0, self._save_is_due(done)
        )
        if stop:
            self._save_and_stop(done, stop)
        if save:
            self._save(done)
        self._report_saved()

    def keep_best(self, done: int, result: Evaluation) -> None:
        """Save the best model so far. If that fails, warn and keep the previous one."""
        name = best_folder(done)
        try:
            save_model(self.trainer, self.folder / name, self._control)
        except SaveError as error:
            logger.warning("%s; the previous best model is kept", error)
            self._faults.append(str(error))
            return
        self.recorder.best, self.recorder.best_folder = result, name
        if self._ranks.is_main and not self._writer.busy:
            prune(self.folder, self._settings.checkpoint.keep, name)

    def end_with_best(self) -> None:
        """Save the model as the last model, then load the weights of the best model."""
        save_model(self.trainer, self.last_model, self._control)
        load_weights(self.trainer, self.best_model, self._control)

    @property
    def best_model(self) -> Path:
        return self.folder / (self.recorder.best_folder or "last")

    def _wait_for_mirror(self) -> str:
        """Wait until uploads end. Return why they failed, or an empty string."""
        fault = self._mirror.wait(heartbeat.beat) if self._mirror else ""
        if fault and fault not in self._faults:
            logger.warning(fault)
            self._faults.append(fault)
        return fault

    def _claim_folder(self) -> None:
        """Create and lock the folder of the run. Raises CheckpointError if another run
        uses the folder or it is not writable."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=LOCK_WAIT_S)
            clear_all_leftovers(self.folder)
        except Timeout:
            raise CheckpointError(
                f"another training uses {self.folder}: wait for its end, or give "
                "this one another folder (--params=data_dir=...)"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.folder} cannot be written ({error}): "
                "correct its permissions, or set paths.checkpoints to another folder"
            ) from None

    def _find(self) -> Checkpoint | None:
        """Return the checkpoint to resume on the main rank, and None on other ranks. If
        the main rank fails, raise CheckpointError on all ranks."""
        found, reason = None, None
        if self._ranks.is_main:
            try:
                wanted = self._settings.resume
                found = resume_from(wanted, self.folder, self._identity)
                if self._mirror:
                    step = found.manifest.step if found else 0
                    self._mirror.claim(self._identity, step)
            except (CheckpointError, MirrorError) as error:
                reason = str(error)
            except OSError as error:  # the other ranks wait for the result
                reason = (
                    f"train.resume: {self.folder} cannot be prepared ({error}): free "
                    "space or correct its permissions, then start again"
                )
        if reason := broadcast(reason, self._control):
            raise CheckpointError(reason)
        return found

    def _check_best(self) -> None:
        """Forget the best model if its folder no longer exists."""
        there = self.best_model.is_dir() and self.recorder.best_folder is not None
        if not broadcast(there, self._control):
            self.recorder.best = self.recorder.best_folder = None

    def _save_is_due(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` steps. It is not due while
        the previous one is still being written. Only the main rank decides."""
        if not self._ranks.is_main or self._writer.busy:
            return False
        settings = self._settings.checkpoint
        steps, minutes = settings.every_steps, settings.every_minutes
        if steps is not None and done // steps > self._saved_step // steps:
            return True
        if minutes is None:
            return False
        if self._saved_step == 0:
            minutes = min(minutes, FIRST_MINUTES)
        return time.monotonic() - self._saved_s > 60 * minutes

    def _save(self, done: int) -> None:
        """Copy the state after `done` steps and start writing it. All ranks must call
        this."""
        with self.recorder.phase("checkpoint"):
            self._writer.wait()
            snapshot = self._snapshots.take()
        self._saved_step, self._saved_s = done, time.monotonic()
        if snapshot is not None:
            self._writer.start(snapshot.write, self._manifest(done))

    def _manifest(self, done: int) -> Manifest:
        return Manifest(
            step=done,
            total_steps=self.trainer.total_steps,
            world_size=self._ranks.world_size,
            identity=self._identity,
            best=self.recorder.best_folder,
            versions=versions(),
            accelerated=checkpoint_values(self.trainer.resolved, self.trainer.runtime),
        )

    def _save_and_stop(self, done: int, signum: int) -> None:
        with heartbeat.phase("checkpoint"):
            self._save(done)
            self._writer.wait()
            fault = self._wait_for_mirror()
        newest = self._writer.newest
        if newest is not None and newest.manifest.step == done:
            text = f"saved {newest.folder}; the same command resumes there"
        else:
            older = newest.folder if newest else "none"
            text = f"NOT saved; the newest checkpoint is {older}"
        if self._mirror:
            text += " (NOT in the mirror)" if fault else " (also in the mirror)"
        message = f"stopped after step {done} of {self.trainer.total_steps}: {text}"
        if self._ranks.is_main:
            logger.warning(message)
        raise Interrupted(signum, message)

    def _report_saved(self) -> None:
        """Call the callbacks if a checkpoint has been completed since the last call."""
        newest, before = self._writer.newest, self.recorder.last_checkpoint
        self._note_saved()
        if newest is not None and newest.folder != before:
            folder = {"folder": str(newest.folder)}
            self.recorder.notify("checkpoint", newest.manifest.step, folder)

    def _note_saved(self) -> None:
        if self._writer.newest is not None:
            self.recorder.last_checkpoint = self._writer.newest.folder
        self.recorder.warnings = [*self._faults, *self._writer.faults]
