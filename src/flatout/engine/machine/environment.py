"""Environment variables: the only module that reads or writes them. No torch here.

MKL and OpenMP read theirs once, when torch is imported, so `apply` must come first.
"""

from __future__ import annotations

import getpass
import logging
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flatout.engine.machine.container import quota_cores
from flatout.engine.parameters import RuntimeSettings

logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Ranks:
    """Place of this process among those that train together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def current_ranks() -> Ranks:
    """As a launcher (torchrun, accelerate, Slurm's srun with torchrun) set them."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def launched_from_outside() -> bool:
    """Whether a launcher has set ranks for this process already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def error_file() -> str | None:
    """Where the launcher that started this rank reads what ended it."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def slurm_tasks() -> int:
    """Processes that Slurm's `srun` started of this command; 1 without it."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def usable_cores() -> int:
    """Cores this process may use: affinity, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(quota_cores() or 10**6)))


def nvidia_gpu_count() -> int:
    """GPUs that CUDA would show, asked of the driver without touching CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(
            [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        )
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # any failure of the driver library means: no usable GPU
        return 0


def gpu_names() -> list[str]:
    """A value of CUDA_VISIBLE_DEVICES for each GPU that CUDA would show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(nvidia_gpu_count())]
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name not in ("", "-1")]


def only_gpu(name: str | None) -> dict[str, str]:
    """Variables with which a process sees that GPU alone; none for no GPU."""
    return {} if name is None else {"CUDA_VISIBLE_DEVICES": name}


def hide_gpus() -> None:
    """From here on, also from processes that this one starts."""
    os.environ.update(CUDA_VISIBLE_DEVICES="")


def device_name() -> str:
    """The device that training would use, asked without touching CUDA."""
    if nvidia_gpu_count():
        try:
            import pynvml

            pynvml.nvmlInit()
            return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        except Exception:  # GPUs were named by CUDA_VISIBLE_DEVICES alone
            return "GPU"
    return cpu_name()


def cpu_name() -> str:
    return _of_first_cpu("model name") or "CPU"


def _of_first_cpu(field: str) -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""


def resolve_threads(settings: RuntimeSettings, local_world_size: int = 1) -> int:
    """OMP and MKL threads a process: the guide's 1 beside a GPU, else all cores."""
    if settings.threads != "auto":
        return settings.threads
    if nvidia_gpu_count() > 0:
        return 1
    return max(1, usable_cores() // local_world_size)


def training_environment(
    settings: RuntimeSettings, local_world_size: int = 1
) -> dict[str, str]:
    """Variables for a training process: the parameters' own, the thread counts, and
    what cuBLAS needs for the same bits twice (PyTorch's notes on reproducibility)."""
    threads = str(resolve_threads(settings, local_world_size))
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings.deterministic else {}
    counts = dict.fromkeys(THREAD_VARIABLES, threads)
    return {**fixed, **settings.environment, **counts}


def apply(settings: RuntimeSettings) -> list[str]:
    """Set the variables of `settings`; returns those that come too late for torch."""
    wanted = training_environment(settings, current_ranks().local_world_size)
    changed = [name for name, value in wanted.items() if os.environ.get(name) != value]
    os.environ.update(wanted)
    late = [name for name in changed if name.startswith(("MKL_", "OMP_"))]
    if late and "torch" in sys.modules:
        logger.warning(
            "torch was imported before %s could be set: start a new process "
            "(thread counts are set in torch itself all the same)",
            ", ".join(late),
        )
        return late
    return []


def thread_variables() -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS, where they are set."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def allocator_is_set() -> bool:
    """Whether somebody chose how PyTorch's allocator works."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any(os.environ.get(name) for name in names)


def tracking_uri() -> str | None:
    """The tracking store that the environment names; None where it names none."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def compile_cache_folder() -> Path:
    """Where PyTorch keeps compiled graphs; its own answer takes seconds of imports."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir(), name)


def c_compiler() -> str | None:
    """With which Triton builds what starts a kernel, as its runtime/build.py looks."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those of `variables` that are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def environment_has(name: str, value: str) -> bool:
    return os.environ.get(name) == value


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra`, without a launcher's ranks."""
    inherited = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    return {**inherited, _STARTER: str(os.getpid()), **extra}


@contextmanager
def as_child(extra: Mapping[str, str]) -> Iterator[None]:
    """The variables of `child_environment` in this process, while one starts that takes
    them over."""
    before = dict(os.environ)
    try:
        for name in _RANK_VARIABLES & before.keys():
            del os.environ[name]
        os.environ.update(child_environment(extra))
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def starter() -> int:
    """Process id of who started this process, dead or not. Told once: whom this process
    starts in its turn has another."""
    return int(os.environ.pop(_STARTER, 0)) or os.getppid()


def rank_environment() -> dict[str, str]:
    """This process's environment, for the program that takes its place as a rank."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, **python_path(root)}


def python_path(folder: str) -> dict[str, str]:
    """PYTHONPATH with `folder` before what it holds."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{inherited}" if inherited else folder}


_STARTER = "FLATOUT_STARTER"
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


@contextmanager
def restored(name: str) -> Iterator[None]:
    """Give the variable `name` back its value after the block."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def tokenizer_parallelism(enabled: bool) -> Iterator[None]:
    """Let the Rust tokenizer use all cores (or one) inside the block."""
    with restored("TOKENIZERS_PARALLELISM"):
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if enabled else "false"
        yield


def tracking_uri_kept() -> AbstractContextManager[None]:
    """MLflow writes the store it is told of into the environment, where the next
    session of this process (a notebook's) would take it for the user's word."""
    return restored("MLFLOW_TRACKING_URI")


def free_shared_memory_bytes() -> int | None:
    """Free bytes of /dev/shm; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")  # noqa: S108 - only asked for its size
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
