"""Which devices a trial gets."""

from __future__ import annotations

import pytest

from flatout.engine.parameters import SettingsError
from flatout.engine.sweep.devices import sets_of


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
    assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in sets]
    assert ("GPU 2 stays idle" in caplog.text) == (visible == "0,1,2" and count == 2)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="has 2 GPUs to use: set it to at most 2"):
        sets_of(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sets_of(1) == [{}]
    with pytest.raises(SettingsError, match="CPU core"):
        sets_of(10_000)
