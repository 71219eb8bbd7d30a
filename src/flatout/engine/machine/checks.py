"""Machine checks for the doctor and the start of a run, which do not import torch."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from flatout.engine.files.writable import ELSEWHERE, first_fault
from flatout.engine.machine import environment
from flatout.engine.machine.container import CONTROL_GROUP, quota_cores
from flatout.engine.machine.driver import Driver, query_driver
from flatout.engine.parameters import RuntimeSettings, Settings

HELD_BYTES = 2**30
"""On an idle GPU, the driver and a desktop environment use less memory than this."""
LEAST_FREE_BYTES = 2**30
LEAST_CORES = 1.5
NETWORK_FILE_SYSTEMS = (
    *("afs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "smb"),
)
SHM = "/dev/shm"  # noqa: S108 - only its name

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """A row of the doctor's table. `fix` is empty if there is no problem."""

    check: str
    status: Status
    finding: str
    fix: str = ""


def gib(count: float) -> str:
    """Format a number of bytes in GiB, for example `1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB"


def gpu_programs(driver: Driver | None) -> Finding:
    """Report GPU memory in use by other programs. Call this before using the GPU."""
    held = [
        f"GPU {index}: {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} are used"
        f"{' by process ' * bool(gpu.programs)}{', '.join(map(str, gpu.programs))}"
        for index, gpu in enumerate(driver.gpus if driver else ())
        if gpu.used_bytes > HELD_BYTES
    ]
    if not held:
        return Finding("GPU memory", "ok", "no other program uses any")
    fix = "end those programs, or choose other GPUs: CUDA_VISIBLE_DEVICES=..."
    return Finding("GPU memory", "warn", "; ".join(held), fix)


def counted_cores(count: int) -> str:
    return f"{count} core" if count == 1 else f"{count} cores"


def threads(
    settings: RuntimeSettings,
    before: Mapping[str, str],
    processes: int = 1,
    folder: Path = CONTROL_GROUP,
) -> Finding:
    """Compare the OMP and MKL threads of `processes` processes with the usable cores.
    `before` contains the shell's thread variables, which the parameters override.
    `folder` is the folder of the control group."""
    usable, quota = environment.usable_cores(), quota_cores(folder)
    count = environment.resolve_threads(settings, processes)
    cores = counted_cores(usable)
    text = f"{count} per process (runtime.threads: {settings.threads}), {cores}"
    if quota is not None:
        text += f", the container may use {quota:g} of them"
    if replaced := [f"{n}={v}" for n, v in before.items() if v != str(count)]:
        text += f"; {' and '.join(replaced)} from the shell: ignored"
    if count * processes > usable:
        text += f"; {count * processes} threads in all"
        fix = f"set runtime.threads: auto, or at most {max(1, usable // processes)}"
        return Finding("threads", "warn", text, fix)
    if quota is not None and quota < LEAST_CORES:
        return Finding("threads", "warn", text, "give it more (docker run --cpus=4)")
    return Finding("threads", "ok", text)


def shared_memory(free: int | None, needed: int) -> Finding:
    """Return a finding that compares the `free` bytes of /dev/shm with the bytes that
    loader workers need. `free` is None if there is no /dev/shm."""
    if free is None:
        return Finding(SHM, "ok", "this system has no /dev/shm")
    text = (
        f"{free / 2**20:.0f} MiB free, the loader's workers need {needed / 2**20:.0f}"
    )
    if needed <= free:
        return Finding(SHM, "ok", text)
    fix = (
        "lower train.loader.num_workers or prefetch_factor, or give the container more "
        "(docker run --shm-size=8g)"
    )
    return Finding(SHM, "fail", text, fix)


def disk_space(
    folder: Path, needed: int = LEAST_FREE_BYTES, written: Iterable[Path] = ()
) -> Finding:
    """Report whether the disk of `folder` has `needed` bytes free, and whether `folder`
    and the paths in `written` are writable."""
    there = existing(folder)
    free = shutil.disk_usage(there).free
    text = f"{gib(free)} free in {there}, checkpoints and models need {gib(needed)}"
    if fault := first_fault([folder, *written]):
        return Finding("disk", "fail", fault, ELSEWHERE)
    fix = f"free space, or keep the data elsewhere ({ELSEWHERE})"
    if free >= 2 * needed:
        return Finding("disk", "ok", text)
    return Finding("disk", "fail" if free < needed else "warn", text, fix)


def file_system(folder: Path) -> Finding:
    """Return a finding about the file system of `folder`. A network file system gives a
    warning, because it slows down the loader and checkpoints."""
    there = existing(folder)
    kind = "unknown"
    mounts = psutil.disk_partitions(all=True)
    for mount in sorted(mounts, key=lambda mount: len(mount.mountpoint)):
        if there.is_relative_to(mount.mountpoint):
            kind = mount.fstype  # the last match is the deepest mount point
    if not kind.lower().startswith(NETWORK_FILE_SYSTEMS):
        return Finding("file system", "ok", f"{there} is on {kind}")
    fix = "keep data_dir on a local disk, or save less often (train.checkpoint)"
    return Finding("file system", "warn", f"{there} is on a network ({kind})", fix)


def existing(folder: Path) -> Path:
    """Return `folder` if it exists, or its nearest existing parent."""
    return next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir()
    )


logger = logging.getLogger(__name__)


def warn_at_start(settings: Settings, folder: Path) -> None:
    """Check threads, disk space and GPU memory, and log a warning for each problem."""
    count = processes_here(settings)
    for found in (
        threads(settings.runtime, {}, count),
        disk_space(folder),
        gpu_programs(query_driver()),
    ):
        if found.status != "ok":
            logger.warning(
                "%s: %s. To solve it: %s", found.check, found.finding, found.fix
            )


def processes_here(settings: Settings) -> int:
    """Return the number of ranks on this machine, without validating the settings."""
    if environment.launched_from_outside():
        return environment.current_ranks().local_world_size
    wanted = settings.train.distributed.num_processes
    return (environment.nvidia_gpu_count() or 1) if wanted == "auto" else wanted
