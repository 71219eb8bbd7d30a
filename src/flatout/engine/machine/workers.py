"""Helper processes for work that Python threads cannot share.

Plain subprocesses, not `multiprocessing`: forking is unsafe once threads run, and
spawning would run the caller's main module again. loky avoids both. But its `map` takes
all tasks at once, its processes inherit a launcher's ranks, and joblib, which brings
it, is 0.3 s of imports.
"""

from __future__ import annotations

import json
import queue
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import flatout
from flatout.engine.machine.environment import child_environment

_SIZE = struct.Struct("<q")
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1",
}
LOOK_AHEAD = 4
"""Tasks under way or waiting for their turn, a process: bounds memory."""


class WorkerError(RuntimeError):
    """A helper process failed or died."""


def run_in_order(
    module: str, setup: Any, tasks: Iterable[Any], processes: int
) -> Iterator[bytes]:
    """Answers to `tasks`, in their order, from `processes` copies of `module`.

    `module` calls :func:`serve`. `setup` and the tasks are JSON values. A process
    takes the next task when it is free, so none waits for the longest row.
    """
    pool = _Pool(module, setup, processes)
    threads = ThreadPoolExecutor(processes)
    try:
        waiting: deque[Future[bytes]] = deque()
        for task in tasks:
            waiting.append(threads.submit(pool.ask, task))
            if len(waiting) >= LOOK_AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.close()
        threads.shutdown(cancel_futures=True)


class _Pool:
    def __init__(self, module: str, setup: Any, processes: int) -> None:
        root = str(Path(flatout.__file__).parents[1])
        code = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from {module} import main; main()"
        )
        self._all = [self._start(code, setup) for _ in range(processes)]
        self._idle: queue.LifoQueue[subprocess.Popen[bytes]] = queue.LifoQueue()
        for process in self._all:
            self._idle.put(process)

    def _start(self, code: str, setup: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(_ENVIRONMENT),
        )
        _write_line(process.stdin, setup)
        return process

    def ask(self, task: Any) -> bytes:
        process = self._idle.get()
        try:
            _write_line(process.stdin, task)
            return _read_answer(process)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._all:
            process.kill()
        for process in self._all:
            process.communicate()


def _write_line(pipe: IO[bytes] | None, value: Any) -> None:
    assert pipe is not None  # noqa: S101
    try:
        pipe.write(json.dumps(value).encode() + b"\n")
        pipe.flush()
    except BrokenPipeError:
        raise WorkerError(_DIED) from None


def _read_answer(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None  # noqa: S101
    header = process.stdout.read(_SIZE.size)
    if len(header) < _SIZE.size:
        raise WorkerError(f"{_DIED} (exit status {process.wait()})")
    (size,) = _SIZE.unpack(header)
    answer = process.stdout.read(abs(size))
    if size < 0:
        raise WorkerError(answer.decode())
    return answer


_DIED = "a helper process ended before its work was done: was it killed for memory?"


def serve(prepare: Callable[[Any], Callable[[Any], bytes]]) -> None:
    """The loop of a helper process: answer tasks from stdin until it is closed."""
    answers = open(sys.stdout.fileno(), "wb", closefd=False)
    sys.stdout = sys.stderr  # a stray print must not break the protocol
    work = prepare(json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        try:
            answer = work(json.loads(line))
            answers.write(_SIZE.pack(len(answer)))
        except Exception as error:  # told to the caller, who raises it
            answer = f"{type(error).__name__}: {error}".encode()
            answers.write(_SIZE.pack(-len(answer)))
        answers.write(answer)
        answers.flush()
