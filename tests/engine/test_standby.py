"""Trials by forks of a process that has imported all."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from flatout.engine.benchmark.trials.standby import Standby, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="CUDA does not survive a fork")
MODULE = "tests.engine.standby_trial"


@pytest.fixture
def standby():
    found = Standby()
    yield found
    found.close()


def start(standby, folder, behaviour, stop=None, **variables):
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text("")
    (folder / "behaviour").write_text(behaviour)
    return standby.start(MODULE, folder, {"ASKED": "1", **variables}, stop)


def told(folder):
    return json.loads((folder / "told.json").read_text())


def test_each_trial_has_a_process_and_a_log_of_its_own(tmp_path, standby):
    found = []
    for name in ("a", "b"):
        process = start(standby, tmp_path / name, "tell")
        assert process.wait(20) == 0
        found.append(told(tmp_path / name))
        assert found[-1]["pid"] == process.pid
        assert (tmp_path / name / "log.txt").read_text() == f"this is {name}\n"
    first, second = found
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["argv"] == [str(tmp_path / "a")]
    # What a trial changes in its process is its own.
    assert (first["switch"], second["switch"]) == (0, 0)


def test_another_environment_is_another_standby_process(tmp_path, standby):
    assert start(standby, tmp_path / "a", "tell").wait(20) == 0
    assert start(standby, tmp_path / "b", "tell", ASKED="2").wait(20) == 0
    first, second = told(tmp_path / "a"), told(tmp_path / "b")
    assert (first["asked"], second["asked"]) == ("1", "2")
    assert first["parent"] != second["parent"]
    assert not psutil.pid_exists(first["parent"])


@pytest.mark.parametrize(
    ("behaviour", "status"), [("leave", 3), ("signal", -signal.SIGSEGV)]
)
def test_how_a_trial_ended(tmp_path, standby, behaviour, status):
    assert start(standby, tmp_path / "a", behaviour).wait(20) == status
    assert start(standby, tmp_path / "b", "tell").wait(20) == 0


def test_a_standby_process_that_is_closed_takes_its_trial_along(tmp_path, standby):
    process = start(standby, tmp_path / "a", "hang")
    standby.close()
    assert process.wait(20) == -signal.SIGKILL
    gone(process.pid)


def test_what_is_stopped_before_it_has_begun_is_not_started(tmp_path, standby):
    stop = threading.Event()
    stop.set()
    assert start(standby, tmp_path / "a", "tell", stop=stop) is None
    assert not (tmp_path / "a" / "told.json").exists()


START = """
import os, signal, subprocess, sys
from pathlib import Path
from flatout.engine.benchmark.trials.standby import fork
from flatout.engine.machine.environment import child_environment
folder = Path(sys.argv[1])
if sys.argv[2] == "fork":
    process = fork("{module}", folder, folder / "log.txt")
else:
    command = [sys.executable, "-m", "{module}", str(folder)]
    process = subprocess.Popen(command, env=child_environment({{}}))
(folder / "pid").write_text(str(process.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", ["fork", "command"])
def test_a_trial_ends_whose_starter_died_before_it_had_begun(tmp_path, way):
    (tmp_path / "behaviour").write_text("begin late")
    script = START.format(module=MODULE)
    starter = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), way])
    assert starter.wait(60) == -signal.SIGKILL
    gone(int((tmp_path / "pid").read_text()))


def gone(pid):
    deadline = time.monotonic() + 20
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_one_at_a_time_and_none_is_left(tmp_path, standby):
    process = start(standby, tmp_path / "a", "hang")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert start(standby, tmp_path / "b", "tell") is None
    server = psutil.Process(process.pid).ppid()
    os.kill(server, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    gone(process.pid)
    # Started in the usual way this once, by a new standby process after that.
    assert start(standby, tmp_path / "b", "tell") is None
    assert start(standby, tmp_path / "b", "tell").wait(20) == 0
