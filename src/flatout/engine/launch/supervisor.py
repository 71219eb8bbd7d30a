"""Start the ranks of this machine and supervise them until they have exited.

PyTorch's elastic launcher starts the ranks. Its restarts are not used, because the
launcher would also restart a job with an invalid parameter. It also cannot reduce the
token budget when memory runs out, and does not detect a hanging rank.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from flatout.engine.batches.global_batches import BudgetError
from flatout.engine.checkpoints.checkpoint_folder import CheckpointError
from flatout.engine.launch.agent import FAILURES, command
from flatout.engine.launch.rank import INTERRUPTED, SMALLER
from flatout.engine.machine import environment
from flatout.engine.machine.signals import Interrupted, StopSignals
from flatout.engine.machine.watchdog import (
    FINISHED,
    Beat,
    overdue,
    read_beats,
    stack_file,
)
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import SettingsError
from flatout.engine.rows.rows import TokenRowsError
from flatout.engine.train.keeping.oom import OutOfMemory
from flatout.engine.train.recording.health import NonFiniteError
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)

RANK_MODULE = "flatout.engine.launch.rank"
POLL_S = 0.2
STACKS_WAIT_S = 1.0

OF_THE_JOB: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        SettingsError,
        ModelError,
        CheckpointError,
        NonFiniteError,
        TokenRowsError,
        BudgetError,
    )
}
"""Errors caused by the job itself. Another attempt would fail in the same way."""


class RankError(RuntimeError):
    """Raised if a rank failed or was killed. The message contains its traceback."""

    exit_code = 1


class HangError(RuntimeError):
    """Raised if a rank hangs. The message contains the number of this rank and the
    stacks of all ranks."""

    exit_code = 6


def is_worth_another(error: Exception) -> bool:
    return isinstance(error, (RankError, HangError))


@dataclass
class Attempt:
    """Starts the ranks of one machine and waits until all of them have exited. The
    folder contains the ranks' input."""

    job: TrainJob
    processes: int
    folder: Path

    def __post_init__(self) -> None:
        self._settings = self.job.settings.train.distributed
        self._beats = self.folder / "beats"

    def run(self) -> Exception | None:
        """Run the ranks. Return None if training has finished, or the error that ended
        it. Raises Interrupted if a signal stopped the run."""
        agent = self._start()
        streaming = threading.Thread(target=_stream, args=(agent.stdout,), daemon=True)
        streaming.start()
        try:
            with StopSignals() as signals:
                hang = self._watch(agent, signals)
                streaming.join(timeout=5)
                self._raise_if_interrupted(signals)
        finally:
            self._kill(agent)
        if hang is not None:
            return hang
        return None if agent.returncode == 0 else self._failure()

    def _start(self) -> subprocess.Popen[bytes]:
        runtime, processes = self.job.settings.runtime, self.processes
        variables = environment.training_environment(runtime, processes)
        config = {"nproc_per_node": processes, **self._rendezvous()}
        return subprocess.Popen(
            command(self.folder, RANK_MODULE, config),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # only this process gets Ctrl-C, and forwards it
            env=environment.child_environment(variables),
        )

    def _rendezvous(self) -> dict[str, Any]:
        """Return the options with which several machines connect to machine 0."""
        settings = self._settings
        if settings.num_machines == 1:
            return {}
        return {
            "min_nodes": settings.num_machines,
            "max_nodes": settings.num_machines,
            "rdzv_backend": "static",
            "rdzv_endpoint": settings.rendezvous_endpoint,
            "rdzv_configs": {"rank": settings.machine_rank},
        }

    def _watch(
        self, agent: subprocess.Popen[bytes], signals: StopSignals
    ) -> HangError | None:
        passed_on = False
        while agent.poll() is None:
            time.sleep(POLL_S)
            beats = read_beats(self._beats)
            if signals.received and not passed_on:
                passed_on = True
                for beat in beats:
                    _send(beat.pid, signals.received)
                if not beats:  # no rank has started yet
                    return None
            late = overdue(beats, self._settings.heartbeat_timeout_s, time.monotonic())
            if late:
                return self._hang(late, beats)
        return None

    def _hang(self, late: list[Beat], beats: list[Beat]) -> HangError:
        halted = [beat for beat in beats if _is_stopped(beat.pid)]
        culprit, now = (halted or late)[0], time.monotonic()
        for beat in beats:
            _send(beat.pid, signal.SIGUSR1)
        time.sleep(STACKS_WAIT_S)
        state = " The process is stopped (SIGSTOP)." if halted else ""
        return HangError(
            f"rank {culprit.rank} (process {culprit.pid}) made no progress for "
            f"{now - culprit.progress_s:.0f} s in phase {culprit.phase!r}, after step "
            f"{culprit.step}.{state} All ranks were ended; the same command "
            "resumes from the newest checkpoint. train.distributed.heartbeat_timeout_s "
            "sets the limit. Stacks:\n" + "\n".join(map(self._stacks, beats))
        )

    def _stacks(self, beat: Beat) -> str:
        path = stack_file(self._beats, beat.rank)
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"rank {beat.rank}, {beat.phase}, step {beat.step}:\n{text or '(none)'}"

    def _kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill all remaining ranks, their helper processes and the agent."""
        for beat in read_beats(self._beats):
            if beat.phase != FINISHED:
                _kill_group(beat.pid)
        if agent.poll() is None:
            _kill_group(agent.pid)
        agent.wait()

    def _raise_if_interrupted(self, signals: StopSignals) -> None:
        path = self.folder / INTERRUPTED
        if path.is_file():
            stop = json.loads(path.read_text(encoding="utf-8"))
            raise Interrupted(stop["signum"], stop["message"])
        if signals.received:
            raise Interrupted(signals.received, "stopped before its first step")

    def _failure(self) -> Exception:
        path = self.folder / FAILURES
        failures: list[dict[str, Any]] = []
        with suppress(OSError, ValueError):
            failures = json.loads(path.read_text(encoding="utf-8"))
        if not failures:
            return RankError(
                "the ranks could not be started, or the launcher was killed: see the "
                "output above"
            )
        return self._as_error(min(failures, key=_likeliest_cause))

    def _as_error(self, failure: dict[str, Any]) -> Exception:
        rank, message = failure["rank"], failure["message"]
        if failure["exit_code"] < 0 and not failure["traceback"]:
            name = signal.Signals(-failure["exit_code"]).name
            hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
            return RankError(f"rank {rank} was killed by {name}{hint}")
        kind, _, text = message.partition(": ")
        if kind in OF_THE_JOB:
            return OF_THE_JOB[kind](text)
        if kind == OutOfMemory.__name__:
            return OutOfMemory(text, json.loads((self.folder / SMALLER).read_text()))
        return RankError(f"rank {rank} failed: {message}\n{failure['traceback']}")


def _likeliest_cause(failure: dict[str, Any]) -> tuple[bool, float, int]:
    """Return a sort key for failures of ranks. Ranks killed by a signal other than
    SIGTERM come first, followed by other failures in the order of their times, because
    the first failure usually causes the later ones."""
    killed = failure["exit_code"] < 0 and failure["exit_code"] != -signal.SIGTERM
    return not killed, failure["time_s"], failure["rank"]


def _stream(pipe: IO[bytes] | None) -> None:
    """Show the output of the ranks as it arrives, including in notebooks."""
    if pipe is None:
        return
    for line in pipe:
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status()) == psutil.STATUS_STOPPED
    return False


def _send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads, including its helper processes."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
