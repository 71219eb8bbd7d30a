"""Checks of the machine: exact texts from folders, sockets and facts given to them."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flatout.engine.diagnosis import device, machine, model, ports
from flatout.engine.diagnosis.device import Driver, Torch
from flatout.engine.diagnosis.finding import Finding, examine, guarded, within
from flatout.engine.diagnosis.installation import bytecode, judge
from flatout.engine.diagnosis.startup import quick_checks, warn_at_start
from flatout.engine.machine.container import (
    available_memory_bytes,
    memory_limit_bytes,
    quota_cores,
)
from flatout.engine.models.memory import count_parameters, estimate
from flatout.engine.parameters import RuntimeSettings, Settings, SettingsError

GIB = 2**30
H200 = Torch("2.13.0+cu130", "13.0", 1, (9, 0), True, True, "2.28.3", ("gcc",), True)
CPU = Torch("2.13.0+cpu", None, 0, None, False, False, None, ("g++", "gcc"), True)
DRIVER = Driver("580.159", (13, 0), (("NVIDIA H200", 140 * GIB),))


def text(found: Finding) -> tuple[str, str, str]:
    return found.status, found.finding, found.fix


def group(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_max", ".max")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content + "\n")
    return folder


def test_a_check_that_raises_is_a_row():
    def refuses():
        raise SettingsError("train.epochs is odd")

    def breaks():
        raise OSError(5, "Input/output error")

    rows = examine({"a": refuses, "b": breaks, "c": lambda: Finding("c", "ok", "x")})
    assert rows == [
        Finding("a", "fail", "train.epochs is odd", "it says what to change"),
        Finding(
            "b",
            "warn",
            "could not be checked (OSError: [Errno 5] Input/output error)",
            "nothing is known to be wrong",
        ),
        Finding("c", "ok", "x"),
    ]
    [found] = guarded("a", breaks, "fail")
    assert (found.status, found.fix) == ("fail", "solve that first")
    [found] = examine({"a": breaks}, known=(OSError,))
    assert found == Finding(
        "a", "fail", "[Errno 5] Input/output error", "it says what to change"
    )


def test_a_check_that_does_not_answer_is_left():
    assert within(5, lambda: 7) == 7
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: time.sleep(1))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


@pytest.mark.parametrize(
    ("files", "cores", "limit"),
    [
        ({"cpu_max": "150000 100000", "memory_max": "1073741824"}, 1.5, GIB),
        ({"cpu_max": "max 100000", "memory_max": "max"}, None, None),
        (
            {
                "cpu__cpu.cfs_quota_us": "400000",
                "cpu__cpu.cfs_period_us": "100000",
                "memory__memory.limit_in_bytes": "3221225472",
            },
            4.0,
            3 * GIB,
        ),
        (
            {
                "cpu__cpu.cfs_quota_us": "-1",
                "cpu__cpu.cfs_period_us": "100000",
                "memory__memory.limit_in_bytes": "9223372036854771712",
            },
            None,
            None,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_a_container(tmp_path, files, cores, limit):
    folder = group(tmp_path, **files)
    assert quota_cores(folder) == cores
    assert memory_limit_bytes(folder) == limit


def test_a_small_container_is_named(tmp_path):
    folder = group(tmp_path, cpu_max="50000 100000", memory_max=str(GIB))
    there = psutil.cpu_count()
    assert text(machine.cores(folder)) == (
        "warn",
        f"{there} cores, the container may use 0.5 of them",
        "give it more (docker run --cpus=4)",
    )
    found = machine.memory(folder)
    assert found.status == "warn"
    assert found.finding.endswith("GiB free, the container's limit is 1.0 GiB")
    assert available_memory_bytes(folder) <= GIB


def test_threads_against_cores_and_the_shell():
    settings = RuntimeSettings(threads=4)
    shell = {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "4"}
    assert text(machine.threads(settings, shell, usable=8, processes=2)) == (
        "ok",
        "4 a process (runtime.threads: 4); OMP_NUM_THREADS=64 of the shell do not "
        "count",
        "",
    )
    assert text(machine.threads(settings, {}, usable=2, processes=2)) == (
        "warn",
        "4 a process (runtime.threads: 4); 8 in all wait for 2 cores",
        "set runtime.threads: auto, or at most 1",
    )
    intel = RuntimeSettings(threads=1, environment={"MKL_THREADING_LAYER": "INTEL"})
    found = machine.threads(intel, {}, usable=2)
    assert found.fix == "set runtime.environment.MKL_THREADING_LAYER: GNU"


def test_shared_memory_and_disk(tmp_path):
    assert text(machine.shared_memory(64 * 2**20, 100 * 2**20)) == (
        "fail",
        "64 MiB free, the loader's workers need 100",
        "lower train.loader.num_workers or prefetch_factor, or give the container "
        "more (docker run --shm-size=8g)",
    )
    assert machine.shared_memory(64 * 2**20, 0).status == "ok"
    later = tmp_path / "not" / "there"
    assert machine.disk_space(later, 1).status == "ok"
    full = machine.disk_space(later, 2**60)
    assert (full.status, full.finding.endswith("need 1073741824.0 GiB")) == (
        "fail",
        True,
    )
    assert re.fullmatch(
        r"\d+ MB/s written, \d+ MB/s read", machine.disk_speed(later, 10**6).finding
    )
    assert list(tmp_path.iterdir()) == []
    assert machine.judge_speed(12.3, 400).status == "warn"
    assert machine.judge_speed(400, 12.3).status == "warn"
    assert machine.judge_speed(400, 400).status == "ok"
    assert text(machine.judge_speed(400, 401, "nfs4"))[:2] == (
        "warn",
        "400 MB/s written, 401 MB/s read, over a network (nfs4)",
    )


def test_a_folder_on_a_network_is_known_by_its_mount(monkeypatch):
    """The longest mount above a folder is the one that it lies on."""
    mounts = [("/", "ext4"), ("/data", "nfs4"), ("/data/local", "xfs")]
    found = [SimpleNamespace(mountpoint=m, fstype=kind) for m, kind in mounts]
    monkeypatch.setattr(machine.psutil, "disk_partitions", lambda all: found)
    assert machine.network_file_system(Path("/data/01_raw")) == "nfs4"
    assert machine.network_file_system(Path("/data/local/x")) is None
    assert machine.network_file_system(Path("/database")) is None


def test_other_programs_on_a_gpu_are_named():
    assert device.gpu_neighbours(None).status == "ok"
    two = replace(DRIVER, gpus=DRIVER.gpus * 2, programs=((), (7, 12)))
    assert (
        device.gpu_neighbours(replace(two, used_bytes=(GIB // 2, GIB))).status == "ok"
    )
    assert text(device.gpu_neighbours(replace(two, used_bytes=(0, 30 * GIB)))) == (
        "warn",
        "GPU 1: 30.0 GiB of 140.0 GiB are held by process 7, 12",
        "end those programs, or choose other GPUs: CUDA_VISIBLE_DEVICES=...",
    )


def test_packages_that_every_command_compiles_anew(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert bytecode("plain", forbidden=False).status == "ok"
    found = bytecode("plain", forbidden=True)
    assert found.status == "warn"
    assert found.fix.startswith("unset it, or once: python -m compileall -q -j 0 ")
    cache = Path(importlib.util.cache_from_source(str(tmp_path / "plain.py")))
    cache.parent.mkdir()
    cache.write_bytes(b"")
    assert bytecode("plain", forbidden=True).finding == "plain is compiled"


def test_versions_outside_of_their_ranges():
    wanted = ["pydantic>=2,<3", "numpy<1", "not-there-at-all>=4", 'x; extra == "dev"']
    found = judge(">=3.10", wanted)
    from numpy import __version__ as numpy_version

    assert text(found) == (
        "fail",
        f"numpy {numpy_version}, needed <1; not-there-at-all is not installed, "
        "needed >=4",
        "pip install -c requirements.lock -e .",
    )
    assert judge("<3.0", []).finding.endswith("needed <3.0")
    assert judge(">=3.10", ["pydantic>=2"]).status == "ok"


def test_a_gpu_that_pytorch_cannot_use():
    assert text(device.device(DRIVER, CPU)) == (
        "fail",
        "NVIDIA H200 is there, and PyTorch 2.13.0+cpu cannot use it",
        "install PyTorch for CUDA (pytorch.org/get-started), this one has none",
    )
    assert device.device(DRIVER, H200).finding == "1 x NVIDIA H200, 140.0 GiB each"
    assert device.device(None, CPU).status == "ok"


def test_a_driver_that_is_too_old():
    old = replace(DRIVER, version="535.10", cuda=(12, 2))
    assert text(device.driver_version(old, H200)) == (
        "fail",
        "535.10, runs CUDA up to 12.2; PyTorch is built for 13.0",
        "update the driver, or install PyTorch for CUDA 12.2",
    )
    assert device.driver_version(DRIVER, H200).status == "ok"
    assert device.driver_version(None, CPU).finding == "no NVIDIA driver here"


@pytest.mark.parametrize(
    ("torch", "precision", "status"),
    [
        (H200, "auto", "ok"),
        (H200, "fp32", "warn"),
        (CPU, "auto", "ok"),
        (CPU, "bf16", "warn"),
        (CPU, "fp16", "fail"),
    ],
)
def test_precision(torch, precision, status):
    found = device.precision(torch, RuntimeSettings(precision=precision))
    assert found.status == status


def test_kernels_and_compilers(monkeypatch):
    slow = RuntimeSettings(attention="eager", tf32=False)
    monkeypatch.setattr(device, "_has_flash4", lambda: False)
    assert device.attention(H200, RuntimeSettings(), 512).finding == "there"
    long = device.attention(H200, RuntimeSettings(), 513)
    assert long.status == "ok" and "runtime.attention: flash4" in long.finding
    asked = RuntimeSettings(attention="flash4")
    assert device.attention(H200, asked).status == "fail"
    ampere = replace(H200, capability=(8, 0))
    assert device.attention(ampere, RuntimeSettings(), 513).finding == "there"
    assert device.attention(H200, slow).status == "warn"
    assert device.tf32(H200, slow).finding == ("the GPU has it, runtime.tf32 is false")
    assert device.tf32(CPU, slow).status == "ok"
    settings = Settings()
    assert device.compiler(H200, settings).finding == "triton, gcc"
    assert text(device.compiler(replace(H200, compilers=()), settings)) == (
        "fail",
        "triton: torch.compile needs one",
        "install one (apt install g++), or set train.compile: false",
    )
    assert device.compiler(CPU, settings).finding == (
        "g++, gcc; train.compile: auto needs none"
    )
    assert device.nccl(replace(H200, nccl=None), 2).status == "fail"
    assert device.nccl(H200, 2).finding == "2.28.3 for 2 processes"


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_port_in_use_names_its_process():
    with listening() as server:
        port = server.getsockname()[1]
        found = ports.ui_port(port, "make ui", "kedro mlflow ui")
        mine = f"{psutil.Process().name()} (process {os.getpid()})"
        assert found.status == "warn"
        assert found.finding == f"make ui needs it, and {mine} has it"
        start, _, other = found.fix.rpartition(" ")
        assert start == (
            "end that process, or take another port: kedro mlflow ui --port"
        )
        assert ports.is_free(int(other))
    assert ports.ui_port(port, "make ui", "x") == Finding(
        f"port {port}", "ok", "free for make ui"
    )


def test_rendezvous_of_several_machines():
    def settings(endpoint: str, rank: int = 0):
        distributed = {
            "num_machines": 2,
            "machine_rank": rank,
            "rendezvous_endpoint": endpoint,
        }
        return Settings(train={"distributed": distributed}).train.distributed

    with listening() as server:
        port = server.getsockname()[1]
        busy = ports.rendezvous(settings(f"localhost:{port}"))
        assert busy.status == "fail"
        assert busy.finding.endswith(f"(process {os.getpid()}) has it")
        answers = ports.rendezvous(settings(f"127.0.0.1:{port}", rank=1))
        assert text(answers) == ("ok", f"127.0.0.1:{port} answers", "")
    silent = ports.rendezvous(settings(f"127.0.0.1:{port}", rank=1))
    assert (silent.status, silent.fix) == (
        "warn",
        "start machine 0 first, and open the port between the machines",
    )
    assert ports.rendezvous(settings(f"localhost:{port}")).status == "ok"
    assert ports.rendezvous(settings("localhost")).finding == (
        "'localhost' is not host:port"
    )


def config(**changes):
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    more = {"intermediate_size": 3072, "vocab_size": 30_522, "model_type": "bert"}
    return SimpleNamespace(
        **{**sizes, **more, "max_position_embeddings": 512, **changes}
    )


def test_memory_of_a_training_is_foretold():
    settings = Settings(train={"global_batch_size": 256}, tokenize={"max_length": 320})
    found = estimate(settings, config(), budget=24_600)
    assert found.parameters == (30_522 + 512) * 768 + 12 * 12 * 768**2
    assert found.states == 16 * found.parameters
    assert found.activations == 12 * 768 * 125 * 24_600
    assert found.total / GIB == pytest.approx(28.0, rel=0.03)  # measured on an H200
    assert estimate(settings, config(), 10**6).tokens == 256 * 320
    assert model.judge_memory(found, 140 * GIB, "H200").status == "ok"
    short = model.judge_memory(found, 16 * GIB, "T4")
    assert (short.status, "train.token_budget" in short.fix) == ("warn", True)
    assert model.judge_memory(found, GIB, "T4").status == "fail"
    less = Settings(train={"gradient_checkpointing": True, "global_batch_size": 256})
    kept = estimate(less, config(), 24_600).activations
    assert kept == 768 * 125 * 24_600 + 4 * 12 * 24_600 * 768


@pytest.mark.parametrize(
    ("kind", "task", "auto"),
    [
        ("bert", "masked-lm", "AutoModelForMaskedLM"),
        ("modernbert", "sequence-classification", "AutoModel"),
        ("gpt2", "causal-lm", "AutoModelForCausalLM"),
        ("qwen3", "causal-lm", "AutoModelForCausalLM"),
    ],
)
def test_weights_are_counted_within_four_percent(kind, task, auto):
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes["pad_token_id"] = 0
    settings = Settings(
        model={"task": task, "config": {"model_type": kind, **sizes}},
        tokenize={"vocab_size": 2000},
    )
    known = model.read_config(settings)
    built = getattr(transformers, auto).from_config(known)
    true = sum(parameter.numel() for parameter in built.parameters())
    assert count_parameters(known, task) == pytest.approx(true, rel=0.04)


def test_a_checkpoint_is_looked_at_before_it_is_loaded(tmp_path):
    def checked(name):
        settings = Settings(model={"name_or_path": str(name)})
        try:
            known = model.read_config(settings)
        except model.NotCached:
            known = None
        return model.checkpoint(settings.model, known)

    assert text(checked(tmp_path)) == (
        "fail",
        f"{tmp_path} holds no config.json",
        "set model.name_or_path to a folder that save_pretrained wrote",
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'
    )
    assert checked(tmp_path).finding == f"{tmp_path}: bert, no *.safetensors there"
    (tmp_path / "model.safetensors").touch()
    assert checked(tmp_path).finding == (
        f"{tmp_path}: bert, saved as BertForMaskedLM; its head is not one for "
        "sequence-classification and starts from scratch"
    )
    assert checked("nobody/has-this").finding == (
        "nobody/has-this is not on this machine: the run fetches it from the Hub"
    )


def test_training_says_at_its_start_what_is_not_ok(tmp_path, caplog):
    settings = Settings(runtime={"threads": 4096})
    rows = {found.check: found.status for found in quick_checks(settings, tmp_path)}
    looked_at = "versions", "bytecode", "cores", "threads", "memory", "disk"
    assert list(rows) == [*looked_at, "GPU memory"]
    assert rows["threads"] == "warn"
    warn_at_start(settings, tmp_path)
    said = [r.getMessage() for r in caplog.records if "threads" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("threads: 4096 a process (runtime.threads: 4096); 4096 ")
    assert "To solve it: set runtime.threads: auto, or at most " in said[0]
