"""Which devices a trial gets, and which sweep."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flatout.engine.parameters import SettingsError
from flatout.engine.sweep.devices import Devices, reserved, sets_of
from tests.conftest import PROJECT


@pytest.mark.parametrize(
    ("visible", "count", "sets"),
    [
        ("0,1,2", 1, ["0", "1", "2"]),
        ("4,GPU-7,6,5", 2, ["4,GPU-7", "6,5"]),
        ("0,1,2", 2, ["0,1"]),
        ("0,1,2", 3, ["0,1,2"]),
    ],
)
def test_gpus_are_dealt_in_sets(visible, count, sets, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = sets_of(count)
    assert [one.variables for one in found] == [
        {"CUDA_VISIBLE_DEVICES": names} for names in sets
    ]
    assert ("GPU 2 stays idle" in caplog.text) == (visible == "0,1,2" and count == 2)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="has 2 GPUs to use: set it to at most 2"):
        sets_of(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [one.variables for one in sets_of(1)] == [{}]
    with pytest.raises(SettingsError, match="CPU core"):
        sets_of(10_000)


HOLDER = """
import sys
from flatout.engine.sweep.devices import Devices, reserved
with reserved([Devices(("7",)), Devices(("5",))]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_gpu_is_one_sweeps_at_a_time(tmp_path, monkeypatch, caplog):
    """Another process has GPUs 5 and 7, and is killed with them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    caplog.set_level("INFO")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
    )
    assert other.stdout.readline() == "held\n"
    with reserved([Devices(("6",)), Devices()]):
        assert not caplog.text, "others are free, and cores are shared"

    def waits_for_seven() -> None:
        with reserved([Devices(("7", "5"))]):
            pass

    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(waits_for_seven)
        while "another sweep trains on it, waiting" not in caplog.text:
            assert not mine.done()
            time.sleep(0.02)
        other.kill()
        other.wait()
        mine.result(30)
