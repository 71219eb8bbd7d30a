"""Helper processes: answers in order, clear errors, nobody left behind."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from flatout.engine.machine.workers import WorkerError, run_in_order, serve

pytestmark = pytest.mark.process


def main():
    """What the helper processes of these tests run."""
    serve(_prepare)


def _prepare(setup):
    def answer(task):
        if task == "fail":
            raise ValueError("bad task")
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print("a stray print")  # noqa: T201
        return f"{setup}{task}".encode()

    return answer


def helpers() -> list[psutil.Process]:
    """Those of this module; tests of other files may have left a fork server."""
    return [
        child
        for child in psutil.Process().children()
        if any(__name__ in part for part in child.cmdline())
    ]


@pytest.fixture(autouse=True)
def _importable(monkeypatch, project):
    path = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def test_answers_come_in_the_order_of_the_tasks():
    answers = list(run_in_order(__name__, "x", range(40), processes=2))
    assert answers == [f"x{i}".encode() for i in range(40)]
    assert not helpers()


def test_an_error_is_told_by_name():
    with pytest.raises(WorkerError, match="ValueError: bad task"):
        list(run_in_order(__name__, None, [1, "fail", 2], processes=1))
    assert not helpers()


def test_a_killed_helper_is_an_error_and_no_hang():
    with pytest.raises(WorkerError, match="ended before its work was done"):
        list(run_in_order(__name__, None, [1, "die", 2], processes=2))
    assert not helpers()


def test_helpers_end_when_nobody_wants_more_answers():
    answers = run_in_order(__name__, None, range(1000), processes=2)
    assert next(answers) == b"None0"
    answers.close()
    assert not helpers()
