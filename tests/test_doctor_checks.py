"""Checks of the machine: exact messages for given folders, sockets and facts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from transformers import BertConfig

from flatout.doctor import device, model
from flatout.doctor.device import Torch
from flatout.doctor.finding import examine, guarded
from flatout.doctor.versions import judge
from flatout.engine.machine import checks, environment
from flatout.engine.machine.checks import Finding, warn_at_start
from flatout.engine.machine.container import memory_limit_bytes, quota_cores
from flatout.engine.machine.driver import Driver, Gpu
from flatout.engine.models.memory import count_parameters, estimate
from flatout.engine.parameters import RuntimeSettings, Settings, SettingsError

GIB = 2**30
H200 = Torch("2.13.0+cu130", "13.0", 1, True, ("gcc",), True)
CPU = Torch("2.13.0+cpu", None, 0, False, ("g++", "gcc"), True)
DRIVER = Driver("580.159", (13, 0), (Gpu("NVIDIA H200", 140 * GIB),))


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
        Finding("a", "fail", "train.epochs is odd", "see the message"),
        Finding(
            "b",
            "warn",
            "could not be checked (OSError: [Errno 5] Input/output error)",
            "no fault is known",
        ),
        Finding("c", "ok", "x"),
    ]
    [found] = guarded("a", breaks, "fail")
    assert (found.status, found.fix) == ("fail", "solve that first")


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


def test_threads_against_cores_and_the_shell(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    settings, free = RuntimeSettings(threads=4), group(tmp_path)
    shell = {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "4"}
    assert text(checks.threads(settings, shell, 2, free)) == (
        "ok",
        "4 per process (runtime.threads: 4), 8 cores; OMP_NUM_THREADS=64 from the "
        "shell: ignored",
        "",
    )
    assert text(checks.threads(settings, {}, 3, free)) == (
        "warn",
        "4 per process (runtime.threads: 4), 8 cores; 12 threads in all",
        "set runtime.threads: auto, or at most 2",
    )
    half = group(tmp_path, cpu_max="50000 100000")
    assert text(checks.threads(settings, {}, 1, half)) == (
        "warn",
        "4 per process (runtime.threads: 4), 8 cores, the container may use 0.5 of "
        "them",
        "give it more (docker run --cpus=4)",
    )


def test_one_core_is_no_plural(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "usable_cores", lambda: 1)
    found = checks.threads(RuntimeSettings(threads=1), {}, 1, group(tmp_path))
    assert found.finding == "1 per process (runtime.threads: 1), 1 core"
    assert device.device(None, CPU, Settings()).finding.endswith(", 1 core, no GPU")


def test_shared_memory_and_disk(tmp_path):
    assert text(checks.shared_memory(64 * 2**20, 100 * 2**20)) == (
        "fail",
        "64 MiB free, the loader's workers need 100",
        "lower train.loader.num_workers or prefetch_factor, or give the container "
        "more (docker run --shm-size=8g)",
    )
    assert checks.shared_memory(64 * 2**20, 0).status == "ok"
    later = tmp_path / "not" / "there"
    assert checks.disk_space(later, 1).status == "ok"
    full = checks.disk_space(later, 2**60)
    assert full.status == "fail"
    assert full.finding.endswith("need 1073741824.0 GiB")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "status"), [("data/raw", "warn"), ("data/local/x", "ok"), ("x", "ok")]
)
def test_a_folder_on_a_network_is_known_by_its_mount(
    tmp_path, monkeypatch, folder, status
):
    """A folder belongs to the deepest mount point above it."""
    (tmp_path / folder).mkdir(parents=True)
    mounts = [
        ("/", "ext4"),
        (tmp_path / "data", "nfs4"),
        (tmp_path / "data/local", "xfs"),
    ]
    found = [SimpleNamespace(mountpoint=str(m), fstype=kind) for m, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert checks.file_system(tmp_path / folder).status == status


def test_other_programs_on_a_gpu_are_named():
    assert checks.gpu_programs(None).status == "ok"
    free = replace(DRIVER.gpus[0], used_bytes=GIB // 2)
    full = replace(DRIVER.gpus[0], used_bytes=30 * GIB, programs=(7, 12))
    assert checks.gpu_programs(replace(DRIVER, gpus=(free, free))).status == "ok"
    assert text(checks.gpu_programs(replace(DRIVER, gpus=(free, full)))) == (
        "warn",
        "GPU 1: 30.0 GiB of 140.0 GiB are used by process 7, 12",
        "end those programs, or choose other GPUs: CUDA_VISIBLE_DEVICES=...",
    )


OLD = replace(DRIVER, version="535.10", cuda=(12, 2))


@pytest.mark.parametrize(
    ("driver", "torch", "precision", "status", "finding"),
    [
        (DRIVER, H200, "auto", "ok", "1 x NVIDIA H200, 140.0 GiB each, driver 580.159"),
        (DRIVER, H200, "fp32", "warn", "bf16 is fast on it"),
        (None, CPU, "auto", "ok", "no GPU"),
        (None, CPU, "bf16", "warn", "bf16 is slow on it"),
        (None, CPU, "fp16", "fail", "fp16 needs a GPU"),
        (DRIVER, CPU, "auto", "fail", "PyTorch 2.13.0+cpu cannot use it"),
        (
            *(OLD, H200, "auto", "fail"),
            "driver 535.10 runs CUDA up to 12.2; PyTorch is built for 13.0",
        ),
    ],
)
def test_the_device_its_driver_and_precision(driver, torch, precision, status, finding):
    settings = Settings(runtime={"precision": precision})
    found = device.device(driver, torch, settings)
    assert (found.status, found.finding[-len(finding) :]) == (status, finding)
    assert bool(found.fix) == (status != "ok")


def test_compilers():
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


def test_training_says_at_its_start_what_is_not_ok(tmp_path, caplog):
    warn_at_start(Settings(runtime={"threads": 4096}), tmp_path)
    [said] = [r.getMessage() for r in caplog.records if "threads" in r.getMessage()]
    assert said.startswith("threads: 4096 per process (runtime.threads: 4096), ")
    assert "To solve it: set runtime.threads: auto, or at most " in said


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


def config(**changes):
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    more = {"intermediate_size": 3072, "vocab_size": 30_522, "model_type": "bert"}
    return BertConfig(**{**sizes, **more, "max_position_embeddings": 512, **changes})


def test_memory_of_a_training_is_foretold():
    settings = Settings(train={"global_batch_size": 256}, tokenize={"max_length": 320})
    found = estimate(settings, config(), budget=24_600)
    matrices = (30_522 + 512) * 768 + 12 * 12 * 768**2
    assert found.parameters == pytest.approx(matrices, rel=0.01)
    assert found.states == 16 * found.parameters
    assert found.activations == 12 * 768 * 125 * 24_600
    assert found.total / GIB == pytest.approx(28.0, rel=0.03)  # measured on an H200
    assert estimate(settings, config(), 10**6).tokens == 256 * 320
    assert model.memory_finding(found, 140 * GIB, "H200").status == "ok"
    short = model.memory_finding(found, 16 * GIB, "T4")
    assert (short.status, "train.token_budget" in short.fix) == ("warn", True)
    assert model.memory_finding(found, GIB, "T4").status == "fail"
    less = Settings(train={"gradient_checkpointing": True, "global_batch_size": 256})
    kept = estimate(less, config(), 24_600).activations
    assert kept == 768 * 125 * 24_600 + 4 * 12 * 24_600 * 768


@pytest.mark.parametrize(
    ("kind", "task", "auto"),
    [
        ("bert", "masked-lm", "AutoModelForMaskedLM"),
        ("modernbert", "sequence-classification", "AutoModelForSequenceClassification"),
        ("gpt2", "causal-lm", "AutoModelForCausalLM"),
        ("qwen3", "causal-lm", "AutoModelForCausalLM"),
    ],
)
def test_weights_are_counted(kind, task, auto):
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
    assert count_parameters(known, settings.model) == true


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
        f"{tmp_path} has no config.json",
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
