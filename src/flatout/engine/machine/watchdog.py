"""Heartbeats of all ranks, for the process that supervises them.

Each rank writes a small file twice per second, and whenever its phase changes. The file
contains the step, the phase, the time of the last progress and the time of writing. The
last one does not advance in a stopped process. Times are from the machine's monotonic
clock, so that processes can compare them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.engine.machine.signals import die_with_parent

ALIVE_INTERVAL_S = 0.5
STOPPED_S = 5.0
"""A process is considered stopped if it has not written its file for this many
seconds."""
FINISHED = "finished"
"""The phase of a rank that has completed its work."""
LONG_PHASES = frozenset(
    {"start", "compile", "evaluate", "audit", "checkpoint", "finish"}
)
LONG_PHASE_FACTOR, LONG_PHASE_LEAST_S = 4, 60.0
"""In long phases, the time limit for progress is multiplied by this factor, and it is
at least this number of seconds."""


@dataclass(frozen=True)
class Beat:
    """The most recent state that a rank has written."""

    rank: int
    pid: int
    step: int
    progress_s: float
    alive_s: float
    phase: str


class Heartbeat:
    """Periodically writes the state of this process to a file, after `start` is
    called."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._rank = 0
        self._step = 0
        self._phase = "start"
        self._progress_s = time.monotonic()
        self.is_compiling: Callable[[], bool] = bool
        """A function that returns whether the process is compiling. The phase is then
        reported as `compile`, because compiling takes longer than a step."""
        self._turn = threading.Lock()

    def start(self, folder: Path, rank: int) -> None:
        """Begin to write heartbeats to `folder`. From then on, this process exits if
        its parent process ends. On SIGUSR1, it writes the stacks of all threads to
        `stack_file`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._rank = folder / f"rank-{rank:05d}.json", rank
        stacks = stack_file(folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        self._write()
        die_with_parent()
        threading.Thread(target=self._stay_alive, name="heartbeat", daemon=True).start()

    def beat(self, step: int | None = None) -> None:
        """Record progress, and the step if it is given."""
        self._progress_s = time.monotonic()
        if step is not None:
            self._step = step

    def enter(self, phase: str) -> None:
        self._phase = phase
        self.beat()
        self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def _write(self) -> None:
        """Write the file atomically, because a partial file would look like a hang."""
        if self._file is None:
            return
        with self._turn:
            phase = "compile" if self.is_compiling() else self._phase
            seen = (self._step, self._progress_s, time.monotonic(), phase)
            beat = Beat(self._rank, os.getpid(), *seen)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(asdict(beat)), encoding="utf-8")
            part.replace(self._file)

    def _stay_alive(self) -> None:
        while True:
            time.sleep(ALIVE_INTERVAL_S)
            with suppress(OSError):  # the disk is full, or the folder is being removed
                self._write()


heartbeat = Heartbeat()
"""The heartbeat of this process."""


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def read_beats(folder: Path) -> list[Beat]:
    """Return the most recent state of each rank that has started."""
    files = sorted(folder.glob("rank-*.json"))
    return [Beat(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def overdue(beats: list[Beat], limit_s: float, now_s: float) -> list[Beat]:
    """Return the beats of ranks that have made no progress for too long. The likeliest
    cause comes first: stopped processes, then the ranks with the lowest step."""
    long_s = max(LONG_PHASE_FACTOR * limit_s, LONG_PHASE_LEAST_S)
    late = [
        beat
        for beat in beats
        if beat.phase != FINISHED
        and now_s - beat.progress_s > (long_s if beat.phase in LONG_PHASES else limit_s)
    ]
    return sorted(
        late, key=lambda b: (now_s - b.alive_s <= STOPPED_S, b.step, b.progress_s)
    )
