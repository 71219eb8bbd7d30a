"""A sign of life of every rank, for whoever watches them.

Each rank keeps one small file: the step, the phase, when it last got on, and when it
was last alive at all (a thread's word, which a stopped process does not give). Times
are of the machine's monotonic clock, so that processes compare.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERN = "rank-*.beat"
_LAYOUT = struct.Struct("<qqdd16s")  # pid, step, got on, alive, phase
_CHECKSUM = struct.Struct("<I")
_SIZE = _LAYOUT.size + _CHECKSUM.size
_READS, _READ_AGAIN_S = 50, 0.001
ALIVE_INTERVAL_S = 0.5
REARM_S = 1.0
FINISHED = "finished"
"""The phase of a rank that has nothing left to do."""
LONG_PHASES = frozenset(
    {"start", "compile", "evaluate", "error_analysis", "checkpoint", "finish"}
)
LONG_PHASE_FACTOR, LONG_PHASE_LEAST_S = 4, 60.0
"""These have no step to show; they get this many times the limit, and no less."""


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    pid: int
    step: int
    progress_s: float
    alive_s: float
    phase: str


class Heartbeat:
    """This process's own; without `start` it only says where a lone process hangs."""

    def __init__(self) -> None:
        self._map: Any = None
        self._watched = False
        self._step = 0
        self._phase = "start"
        self._progress_s = time.monotonic()
        self.is_compiling: Callable[[], bool] = bool
        """Asked whether the process compiles: that has no step to show."""
        self._limit_s: float | None = None
        self._armed_s = 0.0

    def start(self, folder: Path, rank: int, *, watched: bool = True) -> None:
        """Write to `folder` from now on; end when the parent process is gone.
        `watched`: somebody reads there, and names whoever hangs."""
        self._watched = watched
        folder.mkdir(parents=True, exist_ok=True)
        path = beat_file(folder, rank)
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        stacks = stack_file(folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        self._write()
        threading.Thread(target=self._stay_alive, name="heartbeat", daemon=True).start()

    def watch_alone(self, limit_s: float | None) -> None:
        """Nobody watches this process: show its stacks when it makes no progress for
        `limit_s`. None stops it."""
        self._limit_s = None if self._watched else limit_s
        self._armed_s = 0.0
        if limit_s is None:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int | None = None) -> None:
        """Got on, to `step` where one is given."""
        self._progress_s = time.monotonic()
        if step is not None:
            self._step = step
        if self._map is not None:
            self._write()
        if self._limit_s and self._progress_s - self._armed_s > REARM_S:
            self._arm(self._limit_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        self.beat()
        try:
            yield
        finally:
            self._phase = before
            self.beat()

    def enter(self, phase: str) -> None:
        """From here on it is `phase`."""
        self._phase = phase
        self.beat()

    def _arm(self, limit_s: float) -> None:
        self._armed_s = self._progress_s
        limit_s = phase_limit_s(self._phase, limit_s)
        if sys.__stderr__ is not None:
            with suppress(ValueError, OSError):  # a standard error without a file
                faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__)

    def _write(self) -> None:
        phase = "compile" if self.is_compiling() else self._phase
        now = time.monotonic()
        values = (os.getpid(), self._step, self._progress_s, now, phase.encode()[:16])
        data = _LAYOUT.pack(*values)
        # In one copy: `pack_into` first writes zeros, which a reader takes for values.
        self._map[:] = data + _CHECKSUM.pack(zlib.crc32(data))

    def _stay_alive(self) -> None:
        parent = os.getppid()
        while True:
            time.sleep(ALIVE_INTERVAL_S)
            if os.getppid() != parent:  # it was killed: nobody waits for this rank
                os._exit(1)
            self._write()


heartbeat = Heartbeat()
"""One a process."""


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.beat"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def read_beats(folder: Path) -> list[Beat]:
    """Of all ranks that have begun."""
    beats = (_read_beat(path) for path in sorted(folder.glob(PATTERN)))
    return [beat for beat in beats if beat is not None]


def _read_beat(path: Path) -> Beat | None:
    """None where the rank has not begun. Read again while half of it is written: half
    a beat looks like a rank that hangs."""
    for _ in range(_READS):
        data = path.read_bytes()
        if not any(data):
            return None
        values, checksum = data[: _LAYOUT.size], data[_LAYOUT.size :]
        if checksum == _CHECKSUM.pack(zlib.crc32(values)):
            break
        time.sleep(_READ_AGAIN_S)
    else:
        return None
    pid, step, progress_s, alive_s, phase = _LAYOUT.unpack(values)
    rank = int(path.stem.partition("-")[2])
    return Beat(rank, pid, step, progress_s, alive_s, phase.rstrip(b"\0").decode())


def phase_limit_s(phase: str, limit_s: float) -> float:
    if phase not in LONG_PHASES:
        return limit_s
    return max(LONG_PHASE_FACTOR * limit_s, LONG_PHASE_LEAST_S)


def overdue(beats: list[Beat], limit_s: float, now_s: float) -> list[Beat]:
    """Ranks without progress for too long; the likeliest cause of it first: one that
    does not live at all, then the one furthest behind."""
    late = [
        beat
        for beat in beats
        if beat.phase != FINISHED
        and now_s - beat.progress_s > phase_limit_s(beat.phase, limit_s)
    ]
    stopped_before = now_s - 10 * ALIVE_INTERVAL_S
    return sorted(
        late, key=lambda b: (b.alive_s > stopped_before, b.step, b.progress_s)
    )
