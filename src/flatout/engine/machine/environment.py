"""Read and set environment variables. No other module does this.

MKL and OpenMP read their variables only once, so call `apply` before importing torch.
This module does not import torch.
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
from typing import TYPE_CHECKING

from flatout.engine.machine.container import quota_cores
from flatout.engine.machine.driver import query_driver

if TYPE_CHECKING:  # workers that parse docstrings start faster without this module
    from flatout.engine.parameters import RuntimeSettings

logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of processes that train together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def current_ranks() -> Ranks:
    """Return the ranks that a launcher has set, or rank 0 of 1."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def launched_from_outside() -> bool:
    """Return whether a launcher has set the rank of this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def error_file() -> str | None:
    """Return the launcher's error file for this rank, or None if there is none."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def slurm_tasks() -> int:
    """Return the number of processes that `srun` started, or 1 without Slurm."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def usable_cores() -> int:
    """Return how many cores this process may use, given its affinity and CPU quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(quota_cores() or 10**6)))


def nvidia_gpu_count() -> int:
    """Return the number of GPUs visible to CUDA, without initialising CUDA."""
    return len(gpu_names())


def gpu_names() -> list[str]:
    """Return the number or the UUID of each GPU, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return [name for name in names if name not in ("", "-1")]
    try:
        import pynvml

        pynvml.nvmlInit()
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # any failure of the driver library means no usable GPU
        return []


def hide_gpus() -> None:
    """Hide all GPUs from CUDA in this process and in the processes that it starts."""
    os.environ.update(CUDA_VISIBLE_DEVICES="")


def device_name() -> str:
    """Return the name of the device for training, without initialising CUDA."""
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
    """Return the number of OMP and MKL threads per process. `auto` is 1 if there is a
    GPU. Without a GPU, the usable cores are divided equally among the processes."""
    if settings.threads != "auto":
        return settings.threads
    if nvidia_gpu_count() > 0:
        return 1
    return max(1, usable_cores() // local_world_size)


def training_environment(
    settings: RuntimeSettings, local_world_size: int = 1
) -> dict[str, str]:
    """Return the variables to set in a training process: those in the settings, the
    thread counts, and the cuBLAS workspace that deterministic results require."""
    threads = str(resolve_threads(settings, local_world_size))
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings.deterministic else {}
    counts = dict.fromkeys(THREAD_VARIABLES, threads)
    return {**fixed, **settings.environment, **counts}


def apply(settings: RuntimeSettings) -> list[str]:
    """Set the environment variables of `settings` in this process. Return the names of
    variables that have no effect because torch has already been imported."""
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
    """Return the values of OMP_NUM_THREADS and MKL_NUM_THREADS, if they are set."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def allocator_is_set() -> bool:
    """Return whether the user has configured PyTorch's CUDA allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any(os.environ.get(name) for name in names)


def tracking_uri() -> str | None:
    """Return the MLflow tracking URI that the environment sets, if any."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def c_compiler() -> str | None:
    """Return the C compiler that Triton's runtime/build.py would choose, if any."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set the environment variables in `variables` that are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process: this process's environment plus
    `extra`, without the rank variables that a launcher has set."""
    inherited = {
        k: v for k, v in rank_environment().items() if k not in _RANK_VARIABLES
    }
    return {**inherited, _STARTER: str(os.getpid()), **extra}


def starter() -> int:
    """Return the ID of the process that started this one, even if it has ended. Child
    processes do not inherit the variable that contains it."""
    return int(os.environ.pop(_STARTER, 0)) or os.getppid()


def rank_environment() -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH that contains flatout."""
    folders = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


_STARTER = "FLATOUT_STARTER"
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


@contextmanager
def restored(name: str) -> Iterator[None]:
    """Context manager that restores the environment variable `name` on exit."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def tokenizer_parallelism(enabled: bool) -> Iterator[None]:
    """Context manager that sets whether Rust tokenizers use all cores."""
    with restored("TOKENIZERS_PARALLELISM"):
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if enabled else "false"
        yield


def preserve_tracking_uri() -> AbstractContextManager[None]:
    """Context manager that restores MLFLOW_TRACKING_URI, which MLflow sets, because the
    next session in a notebook would mistake its value for the user's choice."""
    return restored("MLFLOW_TRACKING_URI")


def free_shared_memory_bytes() -> int | None:
    """Return the number of free bytes in /dev/shm, or None if it does not exist."""
    try:
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - only its size
    except OSError:
        return None
