"""Run `kedro ...` in a separate process, but without the import time.

A server imports once what all commands need, and forks for each command. Each command
therefore has its own environment, output and exit code, and can be killed. If
pytest-xdist has started the test process, the server is a fork of that process, created
before it imports any tests.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import huggingface_hub.constants
from omegaconf import OmegaConf

from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.garbage import collect_rarely
from flatout.engine.machine.signals import STOPPING

PROJECT = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Same values as in conf/test. torch reads them when this process imports it."""
ONE_AT_A_TIME = threading.Lock()
BOUND_BY_PERMISSIONS = "FLATOUT_TESTS_BOUND_BY_PERMISSIONS"
"""If this variable is set, file permissions apply to the command even for root."""
PRELOADED = (
    "datasets",
    "flatout.reports.report",
    "flatout.reports.pictures",
    "flatout.cli",
    "flatout.datasets",
    "flatout.engine.launch.launch",
    "flatout.engine.predict.judgement",
    "flatout.engine.tasks.sequence_classification",
    "flatout.pipeline_registry",
    "flatout.project.hooks",
    "flatout.project.sessions",
    "flatout.tracking.follow",
    "kedro.framework.cli.cli",
    "kedro_datasets.plotly",
    "matplotlib.figure",
    "mlflow.pyfunc",
    "mlflow.transformers",
    "mlflow.store.tracking.sqlalchemy_store",
    "plotly.offline",
    "tests.forks",
    "tokenizers.trainers",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
)


class Process:
    """A command that the server has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask(do="poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return int(self.returncode or 0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def start(
    arguments: list[str], output: Path, cwd: Path, variables: Mapping[str, str]
) -> Process:
    """Start `kedro ARGUMENTS` in a new process group. If the arguments begin with `-m`
    or `-c`, start `python ARGUMENTS` instead."""
    environment = {**not_activated(), "COLUMNS": "200", **ONE_THREAD, **variables}
    return Process(
        ask(
            do="start",
            arguments=arguments,
            output=str(output),
            cwd=str(cwd),
            variables=environment,
        )
    )


def start_trial(spec: TrialSpec, folder: Path, variables: Mapping[str, str]) -> Process:
    """Start the process of a trial, without the import time."""
    _, *arguments = trials.command(spec, folder)
    return start(arguments, folder / "log.txt", PROJECT, variables)


def start_program(folder: Path, variables: Mapping[str, str]) -> Process:
    """Start the tracking program, without the import time."""
    arguments = ["-m", "flatout.tracking", str(folder)]
    return start(arguments, Path(os.devnull), PROJECT, variables)


def not_activated() -> dict[str, str]:
    """Return the variables of a shell in which this environment is not activated."""
    own = str(Path(sys.executable).parent)
    folders = os.environ["PATH"].split(os.pathsep)
    others = [folder for folder in folders if folder != own]
    kept = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    return {**kept, "PATH": os.pathsep.join(others)}


def ask(**request: Any) -> Any:
    with ONE_AT_A_TIME:
        process = server()
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


FORKED: list[Any] = []


@cache
def server() -> Any:
    """Return the server of this test process. It ends when its input is closed."""
    if FORKED:
        return FORKED[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm"],
        cwd=PROJECT,
        env={**os.environ, "COLUMNS": "200", **ONE_THREAD},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.stdin.close)
    return process


def fork_server() -> None:
    """Fork the server from this process, which needs most of the imports anyway."""
    usual = sys.stdout, sys.stderr  # pytest's
    # Log handlers and consoles that are created now keep these streams.
    sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
    os.environ["COLUMNS"] = "200"
    preload()
    del os.environ["COLUMNS"]
    requests, replies = os.pipe(), os.pipe()
    if not os.fork():
        os.close(requests[1])
        os.close(replies[0])
        run(os.fdopen(requests[0]), os.fdopen(replies[1], "w"))
    sys.stdout, sys.stderr = usual
    os.close(requests[0])
    os.close(replies[1])
    pipes = {"stdin": os.fdopen(requests[1], "w"), "stdout": os.fdopen(replies[0])}
    FORKED.append(SimpleNamespace(**pipes))


def preload() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for group in ("kedro.global_commands", "kedro.project_commands", "kedro.hooks"):
        for plugin in entry_points(group=group):
            plugin.load()
    for file in (PROJECT / "conf/base").glob("*.yml"):  # warms up OmegaConf's parser
        OmegaConf.to_container(OmegaConf.load(file))


def run(requests: IO[str], replies: IO[str]) -> NoReturn:
    """Run the server and, in its forks, the commands. None of them returns."""
    status: Any = 1
    faulthandler.disable()  # pytest enables it, but some commands crash on purpose
    try:
        command = serve(requests, replies)
        status = None if command is None else do(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status if isinstance(status, int) else int(bool(status)))


def serve(requests: IO[str], replies: IO[str]) -> list[str] | None:
    """Answer requests until the input ends. In a fork, return the command to run."""
    gc.freeze()  # keeps garbage collection in forks from copying memory pages
    while line := requests.readline():
        request = json.loads(line)
        if request["do"] == "poll":
            answer = _status(request["pid"])
        elif not (answer := os.fork()):
            _become(request)
            return request["arguments"]
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    return None


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def follow_in_a_fork(folder: Path, variables: Mapping[str, str]) -> Process:
    """Run the tracking program in a fork, without the import time."""
    from flatout.tracking import follow

    if pid := fork():
        return Fork(pid)
    os.setsid()
    os.environ.update(variables)
    try:
        follow.follow(folder)
    finally:
        os._exit(0)


def fork() -> int:
    """Fork, and handle signals afterwards. Python drops an exception that a signal
    raises in what runs after a fork, such as the release of logging's lock."""
    if threading.current_thread() is not threading.main_thread():
        return os.fork()
    noted: list[Any] = []
    note = lambda *given: noted.append(given)  # noqa: E731
    before = {number: signal.signal(number, note) for number in STOPPING}
    pid = os.fork()
    for number, handler in before.items():
        signal.signal(number, handler)
    if pid and noted:
        os.kill(pid, signal.SIGKILL)  # nobody else gets to know of it
        os.waitpid(pid, 0)
        signal.raise_signal(noted[0][0])
    return pid


class Fork(Process):
    """A child of this process."""

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _status(self.pid)
        return self.returncode


OUTPUT = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    # As in a terminal. A shell that runs the tests in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["variables"])
    if "HF_ENDPOINT" in os.environ:
        importlib.reload(huggingface_hub.constants)  # reads the environment
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    files = (os.devnull, os.O_RDONLY), (request["output"], OUTPUT)
    for stream, (name, mode) in zip((0, 1), files, strict=True):
        os.dup2(os.open(name, mode), stream)
    os.dup2(1, 2)
    if BOUND_BY_PERMISSIONS in request["variables"]:
        give_up_capabilities()


def give_up_capabilities() -> None:
    """Drop Linux capabilities, with which root can write to read-only files."""
    version_3, own_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, own_process)
    none = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


def do(command: list[str]) -> Any:
    """Run the command and its exit handlers, and return the exit code. Modules are not
    torn down, which would take 5 s per command."""
    status: Any = None
    try:
        _call(command)
    except SystemExit as end:
        status = end.code
        sys.stderr.write(f"{status}\n" if isinstance(status, str) else "")
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.current_thread()):
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def _call(command: list[str]) -> None:
    from kedro.framework.cli.cli import main

    from flatout.engine.launch import supervisor
    from flatout.tracking import program
    from tests.forks import FORKING

    program.start = follow_in_a_fork
    supervisor.subprocess = trials.subprocess = FORKING
    sys.argv = ["kedro", *command]
    if command[0] not in ("-m", "-c"):
        main()
        return
    sys.argv = command[1:]
    if command[0] == "-c":
        exec(command[1], {"__name__": "__main__"})  # noqa: S102
    else:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    collect_rarely()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not be read as a reply
    preload()
    run(sys.stdin, answers)
