"""Trials by forks of a process that has imported all."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from flatout.engine.benchmark.trials.forks import ForkServer
from flatout.engine.machine.environment import nvidia_gpu_count

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        sys.platform != "linux" or nvidia_gpu_count() > 0,
        reason="CUDA does not survive a fork",
    ),
]
MODULE = "tests.engine.fork_trial"
ASKED = {"ASKED": "1"}


@pytest.fixture(scope="module")
def server():
    return ForkServer()


def start(server, folder, behaviour, **variables):
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text("")
    (folder / "behaviour").write_text(behaviour)
    return server.start(MODULE, folder, {**ASKED, **variables})


def told(folder):
    return json.loads((folder / "told.json").read_text())


def test_each_trial_has_a_process_and_a_log_of_its_own(tmp_path, server):
    found = []
    for name in ("a", "b"):
        process = start(server, tmp_path / name, "tell")
        assert process.wait(60) == process.poll() == process.returncode == 0
        found.append(told(tmp_path / name))
        assert found[-1]["pid"] == process.pid
        assert f"this is {name}\n" in (tmp_path / name / "log.txt").read_text()
    first, second = found
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["argv"] == [str(tmp_path / "a")]
    assert first["asked"] == "1"
    assert "ASKED" not in os.environ
    # What a trial changes in its process is its own.
    assert (first["switch"], second["switch"]) == (0, 0)


def test_another_environment_needs_another_process(tmp_path, server):
    assert start(server, tmp_path / "a", "tell").wait(60) == 0
    assert start(server, tmp_path / "b", "tell", ASKED="2") is None


@pytest.mark.parametrize(
    ("behaviour", "status"), [("leave", 3), ("signal", -signal.SIGSEGV)]
)
def test_how_a_trial_ended(tmp_path, server, behaviour, status):
    assert start(server, tmp_path / "a", behaviour).wait(60) == status
    assert start(server, tmp_path / "b", "tell").wait(60) == 0


START = """
import os, signal, subprocess, sys
from pathlib import Path
from flatout.engine.benchmark.trials.forks import start_fork
from flatout.engine.machine.environment import child_environment
folder = Path(sys.argv[1])
if sys.argv[2] == "fork":
    process = start_fork("fork", "{module}", folder, folder / "log.txt")
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


def test_a_trial_ends_with_the_server_and_the_next_server_is_another(tmp_path, server):
    process = start(server, tmp_path / "a", "hang")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    assert process.wait(60) != 0
    gone(process.pid)
    again = start(server, tmp_path / "b", "tell") or start(
        server, tmp_path / "b", "tell"
    )
    assert again.wait(60) == 0
