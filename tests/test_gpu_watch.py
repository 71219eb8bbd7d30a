"""GPUs watched over a run, by a driver that says what a test tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import pynvml
import pytest

from flatout import tracking
from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.tracking import forwarder as forwarding
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


def test_a_container_knows_others_by_their_coming_first(watch):
    """It sees all processes under numbers that say nothing."""
    neighbour = {STRANGER: 30 * 2**30}
    held = gpu(held=neighbour)
    found = watch(held)
    held["held"].update({STRANGER + 1: 70 * 2**30})  # this run's, or one more neighbour
    [finding] = after(found).findings()
    assert finding.startswith("other programs held up to 30 GiB of GPU 0")


def test_each_finding_is_told_once_when_it_is_seen(watch):
    found = watch(gpu(60, held={os.getpid(): 0, STRANGER: 9 * 2**30}), gpu(95))
    after(found, 1)
    [first] = found.news()
    assert first.startswith("other programs held up to 9 GiB of GPU 0")
    after(found, 2)
    [second] = found.news()
    assert second.startswith("GPU 0 idle 40 %: its rank")
    assert after(found).news() == []
    assert len(found.findings()) == 2


def test_idle_is_what_is_idle_between_steps(watch):
    found = watch(gpu(0))
    for _ in range(20):
        found.sample(training=False)
    assert found.findings() == []
    assert found.summary() == ""


def test_the_end_of_a_short_run_does_not_read_as_the_warning_before(watch):
    found = after(watch(gpu(held={os.getpid(): 0, STRANGER: 9 * 2**30})), 2)
    [told] = found.news()
    assert found.summary() == f"use of GPUs not judged, too few samples; {told}"


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


def test_a_run_is_judged_by_samples_between_its_points(
    tmp_path, watch, monkeypatch, caplog
):
    found = watch(gpu(30))
    monkeypatch.setattr(system, "watch_gpus", lambda _: found)
    monkeypatch.setattr(system, "_monitors", list)
    monkeypatch.setattr(forwarding, "INTERVAL_S", 0.05)
    points = tmp_path / "points.jsonl"
    record = tracking.RunRecord(f"sqlite:///{tmp_path}/m.db", "flatout", None, "run")
    outbox = tracking.begin(points, record, goes_on=False)
    forwarder = tracking.Forwarder(outbox, system_metrics=True)
    forwarder.start()
    forwarder.wait_until_tried(30)
    assert forwarder.gpu_verdict() == (True, "")
    caplog.clear()
    for step in range(4):
        with points.open("a") as file:
            file.write(f'{{"step": {step}, "loss": 1.0, "time": 1.0}}\n')
        assert forwarder.flush()
    assert forwarder.flush()  # no new point: not counted
    told: list[str] = []
    for _ in range(3000):
        told = [m for m in caplog.messages if m.startswith("GPU 0 idle")]
        if told:
            break
        Event().wait(0.01)
    assert told
    is_well, verdict = forwarder.gpu_verdict()
    assert not is_well
    assert verdict.startswith("GPU 0 used 30 %; GPU 0 idle 70 %: it waits")
    assert len(found._gpus[0].used_pct) == 4
    assert forwarder.finish("FINISHED", 0)
    said = [m for m in caplog.messages if m.startswith("GPU 0 idle")]
    assert said == told, "once, before the end"


def started(found, folder, monkeypatch):
    """A run's forwarder that watches as `found` does, asked once."""
    monkeypatch.setattr(system, "watch_gpus", lambda _: found)
    monkeypatch.setattr(system, "_monitors", list)
    record = tracking.RunRecord(f"sqlite:///{folder}/m.db", "flatout", None, "run")
    outbox = tracking.begin(folder / "points.jsonl", record, goes_on=False)
    forwarder = tracking.Forwarder(outbox, system_metrics=True)
    forwarder.start()
    forwarder.wait_until_tried(30)
    return forwarder


def test_what_is_seen_at_the_end_alone_is_told_by_the_verdict(
    tmp_path, watch, monkeypatch, caplog
):
    neighbour = gpu(held={os.getpid(): 0, STRANGER: 9 * 2**30})
    forwarder = started(watch(neighbour), tmp_path, monkeypatch)
    assert forwarder.flush()
    is_well, verdict = forwarder.gpu_verdict()
    assert not is_well
    assert "other programs held up to 9 GiB of GPU 0" in verdict
    assert forwarder.finish("FINISHED", 0)
    assert not [m for m in caplog.messages if "other programs" in m]


def test_what_only_the_last_sample_sees_is_told_behind_the_verdict(
    tmp_path, watch, monkeypatch, caplog
):
    own = gpu(held={os.getpid(): 0})
    forwarder = started(watch(own), tmp_path, monkeypatch)
    assert forwarder.gpu_verdict() == (True, "")
    own["held"][STRANGER] = 9 * 2**30
    assert forwarder.finish("FINISHED", 0)
    told = [m for m in caplog.messages if "other programs held up to 9 GiB" in m]
    assert len(told) == 1


NEIGHBOUR = """
import torch
held = torch.zeros(4 * 2**30, dtype=torch.uint8, device="cuda")
matrix = torch.randn(8192, 8192, device="cuda")
print("burns", flush=True)
while True:
    matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
"""
WATCHED = """
import time, torch
from flatout.tracking.gpu_watch import watch_gpus
watch = watch_gpus()
own = torch.zeros(2 * 2**30, dtype=torch.uint8, device="cuda")
for _ in range(5):
    time.sleep(0.5)
    sampled = watch.sample(training=True)
    print(sampled, flush=True)
print(watch.summary())
"""


@pytest.mark.skipif(not nvidia_gpu_count(), reason="needs a GPU")
@pytest.mark.process
def test_a_real_driver_names_a_neighbour():
    def watched() -> str:
        ran = subprocess.run([sys.executable, "-c", WATCHED], check=False, **options)
        assert ran.returncode == 0, ran.stderr
        sys.stdout.write(ran.stdout)
        return ran.stdout

    options = {"capture_output": True, "text": True}
    assert "other programs" not in watched()
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True
    )
    try:
        assert neighbour.stdout.readline() == "burns\n"
        said = watched()
    finally:
        neighbour.kill()
        neighbour.wait()
    assert "other programs held up to" in said
    assert "GPU 0 used" in said
