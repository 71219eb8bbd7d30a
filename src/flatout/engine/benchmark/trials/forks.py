"""Trials as forks of multiprocessing's fork server, which has imported what they need.

To import PyTorch, transformers and a model's classes takes seconds of a core, a fork a
fraction of one. Every trial has a process of its own all the same. Only on Linux
without a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Protocol

from flatout.engine.machine.environment import (
    as_child,
    environment_has,
    nvidia_gpu_count,
    set_defaults,
    starter,
)
from flatout.engine.machine.signals import die_with_parent

PRELOADED = (
    "flatout.engine.benchmark.measuring.measure",
    "flatout.engine.benchmark.measuring.probes",
)


class Running(Protocol):
    """A process as `subprocess` has it."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Fork:
    """A process of multiprocessing, as `subprocess` would have it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.pid = process, process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("trial", timeout or 0.0)
        return self._process.exitcode


class ForkServer:
    """The fork server of this process; it ends with this process."""

    def __init__(self) -> None:
        self._variables: Mapping[str, str] | None = None
        self._lock = Lock()

    def start(
        self, module: str, folder: Path, variables: Mapping[str, str], kind: str = ""
    ) -> Fork | None:
        """`python -m module folder` under this environment; None if it is to be started
        in the usual way. `kind`: model type whose classes are imported, too."""
        if sys.platform != "linux" or nvidia_gpu_count():
            return None
        with self._lock:
            if self._variables is None:
                self._begin(variables, kind)
        if self._variables != variables:  # libraries read them when they are imported
            return None
        with suppress(EOFError, OSError):  # the server was killed: the next one is new
            log = folder / "log.txt"
            return Fork(start_fork("forkserver", module, folder, log, variables))
        return None

    def _begin(self, variables: Mapping[str, str], kind: str) -> None:
        classes = [f"transformers.models.{kind}.modeling_{kind}"] if kind else []
        forkserver.set_forkserver_preload([*PRELOADED, *classes, *_of_main()])
        with as_child(variables):
            forkserver.ensure_running()
        self._variables = dict(variables)


SERVER = ForkServer()


def _of_main() -> set[str]:
    """Modules whose functions the program has imported: each fork imports it anew."""
    own = vars(sys.modules["__main__"]).values()
    names = {getattr(value, "__module__", None) for value in own if callable(value)}
    return {name for name in names if name and name != "__main__"}


def is_fork(variables: Mapping[str, str]) -> bool:
    """Whether this process is such a trial, under an environment with `variables`: it
    may fork in its turn, before it sets anything up."""
    same = all(environment_has(name, value) for name, value in variables.items())
    return parent_process() is not None and same


def start_fork(
    way: str,
    module: str,
    folder: Path,
    log: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> BaseProcess:
    """`python -m module folder`; what it prints goes to `log`. `way`: of
    multiprocessing, `fork` or `forkserver`. `variables`: set if they are not."""
    parent = os.getpid() if way == "fork" else None  # else it is the server
    process: BaseProcess = get_context(way).Process(  # type: ignore[attr-defined]
        target=_run, args=(module, str(folder), str(log), parent, dict(variables))
    )
    process.start()
    return process


def _run(
    module: str, folder: str, log: str, parent: int | None, variables: dict[str, str]
) -> None:
    set_defaults(variables)  # a server that follows one that was killed has not them
    starter()  # whom the server's environment names has not started this process
    die_with_parent(parent or os.getppid())
    os.setsid()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = [folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
