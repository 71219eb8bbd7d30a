"""Watching the GPUs during a run, with a simulated driver."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest

from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.tracking.system import GpuWatch, watch_gpus

HOT = pynvml.nvmlClocksThrottleReasonHwSlowdown
CAPPED = pynvml.nvmlClocksThrottleReasonSwPowerCap
STRANGER = 2**22 + 1  # above Linux's largest process id


class Nvml:
    """Simulated driver library. Each of `gpus` has throttle reasons and memory by
    process."""

    NVMLError = pynvml.NVMLError
    nvmlClocksThrottleReasonHwSlowdown = HOT
    nvmlClocksThrottleReasonSwThermalSlowdown = (
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    )

    def __init__(self, *gpus):
        self.gpus = [SimpleNamespace(**gpu) for gpu in gpus]

    def nvmlInit(self): ...

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return gpu.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=held)
            for pid, held in gpu.held.items()
        ]


def gpu(reasons=CAPPED, held=None):
    held = {os.getpid(): 20 * 2**30} if held is None else held
    return {"reasons": reasons, "held": held}


@pytest.fixture
def watch(monkeypatch):
    def watched(*gpus):
        names = ",".join(map(str, range(len(gpus))))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        return GpuWatch(Nvml(*gpus), os.getpid())

    return watched


def told(watch, samples=5):
    return [text for _ in range(samples) for text in watch.sample()]


def test_busy_gpus_are_well(watch):
    assert told(watch(gpu(), gpu())) == []


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([gpu(HOT)], "heat or power lowered GPU 0's clock 100 % of"),
        (
            [gpu(), gpu(held={os.getpid(): 2**30, STRANGER: 30 * 2**30})],
            "other programs use 30 GiB of GPU 1: end them",
        ),
    ],
    ids=["hot", "a neighbour"],
)
def test_each_illness_is_named_once(watch, gpus, said):
    found = watch(*gpus)
    [finding] = told(found)
    assert finding.startswith(said)
    assert told(found) == []


def test_a_container_sees_other_process_ids_and_reports_nobody(watch):
    assert told(watch(gpu(held={STRANGER: 30 * 2**30}))) == []


def test_a_gpu_that_the_driver_says_nothing_of_ends_no_run(watch, monkeypatch):
    found = watch(gpu(HOT), gpu(HOT))

    def silent(gpu):
        if gpu is found._gpus["0"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return HOT

    name = "nvmlDeviceGetCurrentClocksThrottleReasons"
    monkeypatch.setattr(found._nvml, name, silent)
    [finding] = told(found)
    assert "GPU 1's clock" in finding


def test_no_gpu_is_not_watched(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert watch_gpus(os.getpid()) is None


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
import os, time, torch
from flatout.tracking.system import watch_gpus
watch = watch_gpus(os.getpid())
own = torch.zeros(2 * 2**30, dtype=torch.uint8, device="cuda")
for _ in range(5):
    time.sleep(0.5)
    print(watch.sample())
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
    assert "other programs use" in said
