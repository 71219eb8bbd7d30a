"""Ranks that fork from a test process, so that they do not repeat its imports."""

import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any

import transformers.models.bert.modeling_bert  # noqa: F401
from accelerate.state import AcceleratorState
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)

from flatout.engine.machine.signals import STOPPING
from flatout.engine.machine.watchdog import Heartbeat, heartbeat
from tests.golden.engine import (
    DistributedSettings,
    ProcessGroup,
    RuntimeSettings,
    set_up,
)
from tests.warm import Fork, fork


def fork_two(
    work: Callable[..., None], *arguments: Any, strategy: str = "ddp", ranks: int = 2
) -> None:
    """Run `work(runtime, group, *arguments)` in two or more ranks of one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    given = port, strategy, work, arguments
    processes = [
        context.Process(target=_join, args=(rank, ranks, *given), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(250)
    assert {process.exitcode for process in processes} == {0}


def _join(
    rank: int, ranks: int, port: int, strategy: str, work: Any, arguments: Any
) -> None:
    named = {"RANK": rank, "LOCAL_RANK": rank}
    named |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (named | place).items()})
    _forget()
    runtime = set_up(RuntimeSettings(precision="fp32", threads=1))
    group = ProcessGroup.join(DistributedSettings(strategy=strategy), runtime)
    work(runtime, group, *arguments)
    group.leave()


def _forget() -> None:
    """Forget that Accelerate was set up for a single rank in the process that was
    forked."""
    AcceleratorState._reset_state(reset_partial_state=True)


class Forked(Fork):
    """`python -m MODULE ...` in a fork of this process, used like a `subprocess.Popen`.
    Errors are part of its output, and the ranks that it starts are also forks."""

    def __init__(
        self,
        args: list[str],
        env: dict[str, str],
        stdout: IO[Any] | int | None = None,
        **_: Any,
    ) -> None:
        self.stdout: IO[bytes] | None = None
        output = None
        if isinstance(stdout, int):  # PIPE
            reading, output = os.pipe()
            self.stdout = os.fdopen(reading, "rb")
        elif stdout is not None:
            output = os.dup(stdout.fileno())
        super().__init__(fork())
        if not self.pid:
            _become(args, env, output)
        if output is not None:
            os.close(output)


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
"""Replacement for the module `subprocess` in a supervisor, which makes ranks forks."""


def _become(args: list[str], env: dict[str, str], output: int | None) -> None:
    status = 1
    try:
        os.setsid()
        for signum in STOPPING:
            signal.signal(signum, signal.SIG_DFL)
        for stream in (1, 2) if output is not None else ():
            os.dup2(output, stream)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
        os.environ.clear()
        os.environ.update(env)
        logging.root.handlers.clear()
        warnings.simplefilter("ignore")
        subprocess_handler.Popen = Forked
        _forget()
        vars(heartbeat).update(vars(Heartbeat()))
        module = args.index("-m") + 1
        sys.argv = [*args[module:]]
        runpy.run_module(args[module], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
