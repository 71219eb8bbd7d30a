"""GPUs watched over a run, by a driver that says what a test tells it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml
import pytest

from flatout import tracking
from flatout.tracking import system
from flatout.tracking.gpu_watch import GpuWatch, watch_gpus

HOT = pynvml.nvmlClocksThrottleReasonHwSlowdown
CAPPED = pynvml.nvmlClocksThrottleReasonSwPowerCap
STRANGER = 2**22 + 1  # above Linux's largest process id


class Nvml:
    """The driver's library; `gpus` by index: use in percent, reasons, memory by pid."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    nvmlClocksThrottleReasonHwSlowdown = HOT
    nvmlClocksThrottleReasonSwThermalSlowdown = (
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    )

    def __init__(self, *gpus):
        self.gpus = [SimpleNamespace(**gpu) for gpu in gpus]

    def nvmlInit(self): ...

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=gpu.used)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return gpu.reasons

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        assert kind == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=held)
            for pid, held in gpu.held.items()
        ]


def gpu(used=95, reasons=CAPPED, held=None):
    held = {os.getpid(): 20 * 2**30} if held is None else held
    return {"used": used, "reasons": reasons, "held": held}


@pytest.fixture
def watch(monkeypatch):
    def watched(*gpus):
        names = ",".join(map(str, range(len(gpus))))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        return GpuWatch(Nvml(*gpus))

    return watched


def after(watch, samples=5):
    for _ in range(samples):
        watch.sample(training=True)
    return watch


def test_busy_gpus_are_well(watch):
    found = after(watch(gpu(95), gpu(93)))
    assert found.findings() == []
    assert found.summary() == "GPU 0 used 95 %, GPU 1 used 93 %"
    assert found.sample(training=False) == {
        "gpu_0_clock_mhz": 1980.0,
        "gpu_0_slowed": 0.0,
        "gpu_0_others_gib": 0.0,
        "gpu_1_clock_mhz": 1980.0,
        "gpu_1_slowed": 0.0,
        "gpu_1_others_gib": 0.0,
    }


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([gpu(95), gpu(60)], "GPU 1 idle 40 %: its rank had less to do"),
        ([gpu(40)], "GPU 0 idle 60 %: it waits for the loader or the host"),
        ([gpu(reasons=HOT)], "heat or power held GPU 0's clock down 100 % of"),
        (
            [gpu(held={os.getpid(): 2**30, STRANGER: 30 * 2**30})],
            "other programs held up to 30 GiB of GPU 0: end them",
        ),
    ],
    ids=["one is idle", "all are idle", "hot", "a neighbour"],
)
def test_each_illness_is_named(watch, gpus, said):
    found = after(watch(*gpus))
    [finding] = found.findings()
    assert finding.startswith(said)
    assert found.summary().endswith(finding)


def test_a_container_cannot_tell_its_own_programs_from_others(watch):
    found = after(watch(gpu(held={STRANGER: 70 * 2**30})))
    assert found.findings() == []


def test_idle_is_what_is_idle_between_steps(watch):
    found = watch(gpu(0))
    for _ in range(20):
        found.sample(training=False)
    assert found.findings() == []
    assert found.summary() == ""


def test_a_gpu_that_the_driver_says_nothing_of_ends_no_run(watch, monkeypatch):
    found = watch(gpu(95), gpu(95))

    def silent(gpu):
        if gpu is found._gpus[0].handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 0

    name = "nvmlDeviceGetCurrentClocksThrottleReasons"
    monkeypatch.setattr(found._nvml, name, silent)
    assert found.sample(training=True).keys() == {
        "gpu_1_clock_mhz",
        "gpu_1_slowed",
        "gpu_1_others_gib",
    }


def test_no_gpu_is_not_watched(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert watch_gpus() is None


def test_a_run_is_judged_by_samples_between_its_points(tmp_path, watch, monkeypatch):
    found = watch(gpu(30))
    monkeypatch.setattr(system, "watch_gpus", lambda _: found)
    monkeypatch.setattr(system, "_monitors", list)
    points = tmp_path / "points.jsonl"
    record = tracking.RunRecord(f"sqlite:///{tmp_path}/m.db", "flatout", None, "run")
    outbox = tracking.begin(points, record, goes_on=False)
    forwarder = tracking.Forwarder(outbox, system_metrics=True)
    forwarder.start()
    forwarder.wait_until_tried(30)
    assert forwarder.gpu_verdict() == (True, "")
    for step in range(4):
        with points.open("a") as file:
            file.write(f'{{"step": {step}, "loss": 1.0, "time": 1.0}}\n')
        assert forwarder.flush()
    assert forwarder.flush()  # no new point: not counted
    is_well, verdict = forwarder.gpu_verdict()
    assert not is_well
    assert verdict.startswith("GPU 0 used 30 %; GPU 0 idle 70 %: it waits")
    assert len(found._gpus[0].used_pct) == 4
    assert forwarder.finish("FINISHED", 0)
