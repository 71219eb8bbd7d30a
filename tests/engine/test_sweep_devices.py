"""Which devices a trial gets, and which sweep."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout.engine.parameters import SettingsError
from flatout.engine.sweep.devices import Devices, sets_of
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


def test_names_of_one_card_in_another_order_are_the_same_locks():
    with Devices(("3", "5")).held() as ours, Devices(("5", "3")).held() as again:
        assert (ours, again) == (True, False)


HOLDER = """
import sys
from flatout.engine.sweep.devices import Devices
with Devices(("7",)).held() as ours:
    print(ours, flush=True)
    sys.stdin.read()
"""


def test_a_gpu_is_one_sweeps_at_a_time(tmp_path, monkeypatch):
    """Another process has GPU 7, and is killed with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
    )
    assert other.stdout.readline() == "True\n"
    with Devices(("6", "7")).held() as ours:
        assert not ours
        with Devices(("6",)).held() as free:
            assert free, "what could be had of a set is let go"
    other.kill()
    other.wait()
    with Devices(("6", "7")).held() as ours:
        assert ours
    with Devices().held() as ours, Devices().held() as again:
        assert ours, "cores are shared"
        assert again
