"""Environment variables: the only module that reads or writes them. No torch here.

MKL and OpenMP read theirs once, when torch is imported, so call `apply` first.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flatout.engine.machine.container import quota_cores
from flatout.engine.machine.driver import query_driver
from flatout.engine.parameters import RuntimeSettings

logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process among those that train together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def current_ranks() -> Ranks:
    """Ranks set by the launcher (torchrun, accelerate, Slurm's srun with torchrun)."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def launched_from_outside() -> bool:
    """Return whether a launcher has already set ranks for this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def error_file() -> str | None:
    """File in which the launcher expects this rank's error; None without it."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def slurm_tasks() -> int:
    """Processes that Slurm's `srun` started for this command; 1 without it."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def usable_cores() -> int:
    """Number of cores this process may use: CPU affinity, limited by the CPU quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(quota_cores() or 10**6)))


def nvidia_gpu_count() -> int:
    """Number of GPUs visible to CUDA, counted without starting CUDA."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(gpu_names())
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # any failure of the driver library means: no usable GPU
        return 0


def gpu_names() -> list[str]:
    """Values for CUDA_VISIBLE_DEVICES, one for each GPU that CUDA would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(nvidia_gpu_count())]
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name not in ("", "-1")]


def only_gpu(name: str | None) -> dict[str, str]:
    """Variables that show a process only this GPU; empty if `name` is None."""
    return {} if name is None else {"CUDA_VISIBLE_DEVICES": name}


def hide_gpus() -> None:
    """Hide all GPUs from CUDA in this process and the processes that it starts."""
    os.environ.update(CUDA_VISIBLE_DEVICES="")


def device_name() -> str:
    """Name of the device that training would use, found without starting CUDA."""
    if not nvidia_gpu_count():
        return cpu_name()
    driver = query_driver()
    return driver.gpus[0].name if driver and driver.gpus else "GPU"


def cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return "CPU"


def resolve_threads(settings: RuntimeSettings, local_world_size: int = 1) -> int:
    """Number of OMP and MKL threads per process: 1 with a GPU, else all cores."""
    if settings.threads != "auto":
        return settings.threads
    if nvidia_gpu_count() > 0:
        return 1
    return max(1, usable_cores() // local_world_size)


def training_environment(
    settings: RuntimeSettings, local_world_size: int = 1
) -> dict[str, str]:
    """Variables of a training process: from the parameters, the thread counts, and
    cuBLAS's workspace for bitwise reproducible results (see PyTorch's notes)."""
    threads = str(resolve_threads(settings, local_world_size))
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings.deterministic else {}
    counts = dict.fromkeys(THREAD_VARIABLES, threads)
    return {**fixed, **settings.environment, **counts}


def apply(settings: RuntimeSettings) -> list[str]:
    """Set the variables of `settings`; return those that are set too late for torch."""
    wanted = training_environment(settings, current_ranks().local_world_size)
    changed = [name for name, value in wanted.items() if os.environ.get(name) != value]
    os.environ.update(wanted)
    late = [name for name in changed if name.startswith(("MKL_", "OMP_"))]
    if late and "torch" in sys.modules:
        logger.warning(
            "torch was imported before %s was set: start a new process to use it "
            "(the number of threads is set in torch directly)",
            ", ".join(late),
        )
        return late
    return []


def thread_variables() -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS, if they are set."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def allocator_is_set() -> bool:
    """Return whether the user configured PyTorch's CUDA allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any(os.environ.get(name) for name in names)


def tracking_uri() -> str | None:
    """Tracking store from the environment; None if it is not set."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def c_compiler() -> str | None:
    """C compiler for Triton's launchers, found as Triton's runtime/build.py does."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set each of `variables` that is not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this process's and `extra`, without a
    launcher's ranks."""
    inherited = {
        k: v for k, v in rank_environment().items() if k not in _RANK_VARIABLES
    }
    return {**inherited, _STARTER: str(os.getpid()), **extra}


def starter() -> int:
    """Process id of the process that started this one, even if it has ended. The
    variable is removed, because children of this process have another parent."""
    return int(os.environ.pop(_STARTER, 0)) or os.getppid()


def rank_environment() -> dict[str, str]:
    """Return this process's environment, in which other programs find flatout too."""
    folders = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


_STARTER = "FLATOUT_STARTER"
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


@contextmanager
def restored(name: str) -> Iterator[None]:
    """Restore the variable `name` after the block."""
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


def preserve_tracking_uri() -> AbstractContextManager[None]:
    """Restore MLFLOW_TRACKING_URI after the block: MLflow sets it, and a notebook's
    next session would mistake it for the user's choice."""
    return restored("MLFLOW_TRACKING_URI")


def free_shared_memory_bytes() -> int | None:
    """Free bytes of /dev/shm; None if it does not exist."""
    try:
        status = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
