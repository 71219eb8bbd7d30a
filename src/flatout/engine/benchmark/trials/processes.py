"""Run a trial of the benchmark in a separate process.

Each trial has its own process group and a time limit, so that a trial that hangs, dies
or fills the memory affects only itself. The parent process never uses the device.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import psutil

from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.files.atomic_write import write_text
from flatout.engine.launch import agent
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.container import available_memory_bytes
from flatout.engine.machine.environment import (
    child_environment,
    nvidia_gpu_count,
    training_environment,
)

logger = logging.getLogger(__name__)

MODULE = "flatout.engine.benchmark.trials.trial"
"""The module that runs in a trial's process."""
KEPT = frozenset({"ok", "oom"})
"""Statuses that are final. A resumed benchmark does not repeat such trials."""
POLL_S = 0.1
MAX_NOTE = 500


@dataclass(frozen=True)
class Answer:
    """The result of a trial's process. `figures` are its metrics by name."""

    status: str
    note: str
    elapsed_s: float
    figures: Mapping[str, Any]


def stored_answer(folder: Path) -> Answer | None:
    """Return a trial's stored result, or None if the trial still has to be run."""
    file = folder / "answer.json"
    try:
        answer = Answer(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # truncated, e.g. by a full disk
        logger.warning("%s is incomplete (%s): the trial runs again", file, error)
        return None
    return answer if answer.status in KEPT else None


def ask(
    spec: TrialSpec,
    files: JobFiles,
    folder: Path,
    timeout_s: float,
    headroom: float,
    variables: Mapping[str, str],
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Run a trial in `folder` and store its result there. `headroom` is the fraction of
    memory that should stay free. Without a GPU, the trial is stopped once it uses more
    than 1 - `headroom` / 2 of the available memory. The other arguments are those of
    `run_isolated`."""
    write_spec(spec, asdict(files), folder)
    limit = None
    if not nvidia_gpu_count():
        limit = int(available_memory_bytes() * (1 - headroom / 2))
    answer = run_isolated(
        spec, folder, timeout_s, limit, variables=variables, stop=stop
    )
    if answer.status != "stopped":
        write_text(folder / "answer.json", json.dumps(asdict(answer)))
    return answer


def write_spec(spec: TrialSpec, job: Mapping[str, Any], folder: Path) -> None:
    """Write the input of a trial's process. `job` has the fields of a `JobFiles`."""
    folder.mkdir(exist_ok=True)
    asked = {"spec": spec.as_json(), "job": job}
    (folder / "spec.json").write_text(json.dumps(asked, indent=1))


def run_isolated(
    spec: TrialSpec,
    folder: Path,
    timeout_s: float,
    max_resident_bytes: int | None,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Run the trial specified in `folder`/spec.json and return its result. The log
    begins with a command that repeats the trial in a terminal. `variables` are added to
    the trial's environment. The trial is stopped after `timeout_s`, if it uses more
    than `max_resident_bytes`, or if `stop`, which is called every POLL_S seconds,
    returns True."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    begin = time.perf_counter()
    own = {**training_environment(spec.settings.runtime, spec.world_size), **variables}
    given = [f"{name}={value}" for name, value in own.items()]
    by_hand = shlex.join(["env", *given, *command(spec, folder)])
    (folder / "log.txt").write_text(f"$ {by_hand}\n")
    process = _start(spec, folder, own)
    try:
        fault = wait_for(process, timeout_s, max_resident_bytes, stop)
    finally:
        end_groups(process)
    elapsed_s = time.perf_counter() - begin
    if fault is None and not result.exists():
        fault = _death(process.returncode)
    if fault is not None:
        return Answer(fault[0], fault[1], elapsed_s, {})
    stored = json.loads(result.read_text())
    note = shorten(stored["note"], MAX_NOTE, placeholder=" …")
    return Answer(stored["status"], note, elapsed_s, stored["figures"])


def _start(
    spec: TrialSpec, folder: Path, own: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            command(spec, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=child_environment(own),
            start_new_session=True,
        )


def command(spec: TrialSpec, folder: Path) -> list[str]:
    """Return the command that runs the trial on all of its ranks."""
    if spec.world_size == 1:
        return [sys.executable, "-m", MODULE, str(folder)]
    # The agent ends when this process ends, and then ends its ranks.
    return agent.command(folder, MODULE, {"nproc_per_node": spec.world_size})


def wait_for(
    process: subprocess.Popen[bytes],
    timeout_s: float,
    max_resident_bytes: int | None,
    stop: Callable[[], bool] | None,
) -> tuple[str, str] | None:
    """Wait for the process to end, and return None. If the process has to be stopped,
    return the trial's status and note instead. The caller must then end the process."""
    deadline = time.perf_counter() + timeout_s
    while process.poll() is None:
        if time.perf_counter() > deadline:
            return "timeout", f"stopped after {timeout_s:g} s"
        if stop is not None and stop():
            return "stopped", "stopped from outside"
        if max_resident_bytes and _resident_bytes(process.pid) > max_resident_bytes:
            return "oom", f"stopped at {max_resident_bytes / 2**30:.1f} GiB resident"
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return None


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    total = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            total += one.memory_info().rss
    except psutil.Error:  # the process ended during the query
        pass
    return total


def end_groups(process: subprocess.Popen[bytes]) -> None:
    """Kill the process groups of the trial, its workers and its ranks."""
    groups = {process.pid}
    with suppress(psutil.NoSuchProcess):  # the trial has ended, so its ranks will end
        below = psutil.Process(process.pid).children(recursive=True)
        groups |= {child.pid for child in below}
    for pid in groups:
        with suppress(ProcessLookupError):  # the process does not lead a group
            os.killpg(pid, signal.SIGKILL)
    process.wait()


def _death(returncode: int) -> tuple[str, str]:
    if returncode == -signal.SIGKILL:
        return "error", "killed, most likely because the machine's memory was full"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return "error", f"killed by {name}: see its log"
    return "error", f"ended with exit code {returncode} and no result: see its log"
