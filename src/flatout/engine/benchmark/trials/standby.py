"""A process that has imported what trials need, and forks one for each.

`python -m flatout.engine.benchmark.trials.standby FD`, with the file descriptor of a
connection. To import PyTorch, transformers and a model's classes takes 20 s of a core
here, a fork 0.3 s. Every trial has a process of its own all the same. Only on machines
without a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.environment import (
    child_environment,
    environment_has,
    nvidia_gpu_count,
    starter,
)
from flatout.engine.machine.signals import die_with_parent

TRIAL = "flatout.engine.benchmark.trials.trial"
"""What a trial's process runs."""
POLL_S = 0.2


class Running(Protocol):
    """A process as `subprocess` has it."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Fork:
    """A trial's process, whose exit status the standby process tells."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._hear(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("trial", timeout or 0.0)
        return self.returncode

    def _hear(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        try:
            if self._connection.poll(timeout):
                self.returncode = self._connection.recv()
        except (
            EOFError,
            OSError,
        ):  # the standby process is gone, and its forks with it
            self.returncode = -signal.SIGKILL


class Standby:
    """Starts trials of one device by forks, one at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._variables: Mapping[str, str] = {}
        self._last: Fork | None = None

    def start(
        self,
        module: str,
        folder: Path,
        variables: Mapping[str, str],
        stop: threading.Event | None = None,
    ) -> Fork | None:
        """`python -m module folder` under this environment; None where it is to be
        started in the usual way, and where `stop` is set before it has begun."""
        if not can_fork() or (self._last and self._last.poll() is None):
            return None
        try:
            connection = self._ready(variables)
            connection.send((module, str(folder)))
            while not connection.poll(POLL_S):  # it imports
                if stop is not None and stop.is_set():
                    self.close()
                    return None
            self._last = Fork(connection.recv(), connection)
        except (EOFError, OSError):
            self.close()
            return None
        return self._last

    def close(self) -> None:
        """End the process; a trial that it has begun ends with it."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._server = self._connection = self._last = None

    def _ready(self, variables: Mapping[str, str]) -> Connection:
        """To a process with these variables: libraries read them when imported."""
        if self._connection is None or self._variables != variables:
            self.close()
            ours, theirs = Pipe()
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=child_environment(variables),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process that asks
            )
            theirs.close()
            self._connection, self._variables = ours, variables
        return self._connection


def can_fork() -> bool:
    return sys.platform == "linux" and not nvidia_gpu_count()


def is_fork(variables: Mapping[str, str]) -> bool:
    """Whether this process is such a trial, under an environment with `variables`: it
    may fork in its turn, before it sets anything up."""
    same = all(environment_has(name, value) for name, value in variables.items())
    return parent_process() is not None and same


def fork(module: str, folder: Path, log: Path) -> BaseProcess:
    """`python -m module folder`; what it prints goes to `log`."""
    asked = (module, folder, log, os.getpid())
    process = get_context("fork").Process(target=_run, args=asked)
    process.start()
    return process


def _run(module: str, folder: Path, log: Path, parent: int) -> None:
    die_with_parent(parent)
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = [str(folder)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(connection: Connection) -> None:
    """Fork for each folder that comes, tell its process and then its exit status; end
    where the other side has ended."""
    asker, prepared = starter(), False
    with suppress(EOFError, OSError):
        while True:
            module, name = connection.recv()
            folder = Path(name)
            if module == TRIAL and not prepared:
                prepared = _prepare(folder)
            process = fork(module, folder, folder / "log.txt")
            connection.send(process.pid)
            while process.is_alive() and os.getppid() == asker:
                process.join(POLL_S)
            if process.is_alive():  # nobody waits for it any more
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
            connection.send(process.exitcode)


def _prepare(folder: Path) -> bool:
    """Import all that the trial in `folder` needs. Faults are for the trial to tell."""
    with suppress(Exception):
        from flatout.engine.benchmark.measuring import measure, memory_probe, probes
        from flatout.engine.train.setup.assemble import build_model

        del measure, memory_probe, probes
        stored = json.loads((folder / "spec.json").read_text())
        settings = TrialSpec.from_json(stored["spec"]).settings
        build_model(JobFiles(**stored["job"]).open(settings, folder), empty=True)
    return True


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
