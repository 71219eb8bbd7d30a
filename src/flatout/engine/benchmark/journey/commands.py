"""A whole command as a process: its log, its end, and the seconds it took outside."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.trials.processes import (
    MAX_NOTE,
    Answer,
    end_groups,
    wait_for,
)

END_GROUP = 'read -r _; kill -9 "-$1"'
"""A shell that waits until nobody holds its input any more."""


@dataclass(frozen=True)
class WholeRun:
    """flatout's command from raw data to the saved model, as its user types it."""

    argv: Callable[[Path, Mapping[str, Any]], Sequence[str]]
    """(a file that it may write, parameters) -> the command that runs with them."""
    project: Path
    """Folder in which it is typed."""
    raw: Path
    """Raw data, which a fresh data folder is given; may be missing."""
    places: Mapping[str, str]
    """Entries of the catalog: their paths inside a data folder."""


def timed(
    command: Sequence[str],
    log: Path,
    project: Path,
    variables: Mapping[str, str],
    timeout_s: float,
    max_resident_bytes: int | None,
) -> Answer:
    """Run `command` in `project`, with `variables` as its whole environment. Without
    figures: what it leaves is its own."""
    log.write_text(f"$ {shlex.join(command)}\n")
    with log.open("a") as target:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=project,
            env=variables,
            stdout=target,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with _ended_with_this_process(process.pid):
                fault = wait_for(process, timeout_s, max_resident_bytes, None)
            elapsed_s = time.perf_counter() - begin
        finally:
            end_groups(process)
    if fault is None and process.returncode:
        fault = "error", f"ended with {process.returncode}: {_last_line(log)}"
    status, note = fault or ("ok", f"{elapsed_s:.1f} s")
    return Answer(status, note[:MAX_NOTE], elapsed_s, {})


@contextmanager
def _ended_with_this_process(group: int) -> Iterator[None]:
    """A command of another program watches no parent; a shell does it for the whole
    `group`, also where this process is killed."""
    command = ["/bin/sh", "-c", END_GROUP, "sh", str(group)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()


def _last_line(log: Path) -> str:
    """What a command said last: of an error, what it is."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
