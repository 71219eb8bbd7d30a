"""Cores, threads, memory, /dev/shm and the disk: nothing here needs torch."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from flatout.engine.diagnosis.finding import Finding
from flatout.engine.files.writable import ELSEWHERE, first_fault
from flatout.engine.machine import environment
from flatout.engine.machine.container import (
    CONTROL_GROUP,
    available_memory_bytes,
    memory_limit_bytes,
    quota_cores,
)
from flatout.engine.parameters import RuntimeSettings

WRITTEN_BYTES = 32 * 10**6
SLOW_MB_PER_S = 50
NETWORK_FILE_SYSTEMS = (
    *("afs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "smb"),
)
LEAST_FREE_BYTES = 2**30
LEAST_MEMORY_BYTES = 2 * 2**30


def gib(count: float) -> str:
    """`1.5 GiB`"""
    return f"{count / 2**30:.1f} GiB"


def cores(folder: Path = CONTROL_GROUP) -> Finding:
    """Cores of the machine, and what a container leaves of them."""
    there, usable = psutil.cpu_count() or 1, environment.usable_cores()
    quota = quota_cores(folder)
    if quota is None:
        return Finding("cores", "ok", f"{usable} of {there} usable, no CPU quota")
    text = f"{there} cores, the container may use {quota:g} of them"
    if quota >= 1.5:
        return Finding("cores", "ok", text)
    return Finding("cores", "warn", text, "give it more (docker run --cpus=4)")


def memory(folder: Path = CONTROL_GROUP) -> Finding:
    """Memory of the host that is free, and the container's limit."""
    available, limit = psutil.virtual_memory().available, memory_limit_bytes(folder)
    text = f"{gib(available)} free"
    if limit is not None:
        text += f", the container's limit is {gib(limit)}"
    if available_memory_bytes(folder) >= LEAST_MEMORY_BYTES:
        return Finding("memory", "ok", text)
    fix = "end other programs, or give the container more (docker run --memory=16g)"
    return Finding("memory", "warn", text, fix)


def threads(
    settings: RuntimeSettings,
    before: Mapping[str, str],
    usable: int,
    processes: int = 1,
) -> Finding:
    """Threads of OMP and MKL against the cores; `before`: the variables as the shell
    set them, which the parameters replace."""
    count = environment.resolve_threads(settings, processes)
    text = f"{count} a process (runtime.threads: {settings.threads})"
    replaced = [f"{n}={v}" for n, v in before.items() if v != str(count)]
    if replaced:
        text += f"; {' and '.join(replaced)} of the shell do not count"
    if count * processes > usable:
        text += f"; {count * processes} in all wait for {usable} cores"
        fix = f"set runtime.threads: auto, or at most {max(1, usable // processes)}"
        return Finding("threads", "warn", text, fix)
    if settings.environment.get("MKL_THREADING_LAYER", "GNU") != "GNU":
        text += "; MKL brings threads of its own beside PyTorch's"
        fix = "set runtime.environment.MKL_THREADING_LAYER: GNU"
        return Finding("threads", "warn", text, fix)
    return Finding("threads", "ok", text)


def shared_memory(free: int | None, needed: int) -> Finding:
    """Bytes of /dev/shm that are free, and that the loader's workers fill."""
    if free is None:
        return Finding("/dev/shm", "ok", "there is none")  # noqa: S108 - its name
    mib = f"{free / 2**20:.0f} MiB free, the loader's workers need {needed / 2**20:.0f}"
    if needed <= free:
        return Finding("/dev/shm", "ok", mib)  # noqa: S108
    fix = (
        "lower train.loader.num_workers or prefetch_factor, or give the container more "
        "(docker run --shm-size=8g)"
    )
    return Finding("/dev/shm", "fail", mib, fix)  # noqa: S108


def disk_space(
    folder: Path, needed: int = LEAST_FREE_BYTES, written: Iterable[Path] = ()
) -> Finding:
    """Free bytes where `folder` is or will be; `needed`: for checkpoints, models.
    `written`: what a run writes besides."""
    there = existing(folder)
    free = shutil.disk_usage(there).free
    text = f"{gib(free)} free in {there}, checkpoints and models need {gib(needed)}"
    if fault := first_fault([folder, *written]):
        return Finding("disk", "fail", fault, ELSEWHERE)
    fix = f"free space, or keep the data elsewhere ({ELSEWHERE})"
    if free >= 2 * needed:
        return Finding("disk", "ok", text)
    return Finding("disk", "fail" if free < needed else "warn", text, fix)


def disk_speed(folder: Path, size: int = WRITTEN_BYTES) -> Finding:
    """Writes `size` bytes until the disk has them, reads them back past the page cache
    where the system can be told to forget them, and removes them."""
    data, there = os.urandom(size), existing(folder)
    with tempfile.TemporaryFile(dir=there) as file:
        started = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        file.seek(0)
        file.read()
        read_s = time.perf_counter() - started
    rates = size / written_s / 10**6, size / read_s / 10**6
    return judge_speed(*rates, network_file_system(there))


def judge_speed(written: float, read: float, network: str | None = None) -> Finding:
    """`written`, `read`: MB/s."""
    text = f"{written:.0f} MB/s written, {read:.0f} MB/s read"
    if network:
        text += f", over a network ({network})"
    if network is None and min(written, read) >= SLOW_MB_PER_S:
        return Finding("disk speed", "ok", text)
    fix = "keep data_dir on a local disk, or save less often (train.checkpoint)"
    return Finding("disk speed", "warn", text, fix)


def network_file_system(folder: Path) -> str | None:
    """Its kind, as nfs4, where `folder` lies on one."""
    mounts = sorted(
        psutil.disk_partitions(all=True), key=lambda mount: -len(mount.mountpoint)
    )
    for mount in mounts:
        if folder.is_relative_to(mount.mountpoint):
            kind = mount.fstype
            return kind if kind.lower().startswith(NETWORK_FILE_SYSTEMS) else None
    return None


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that is there."""
    return next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir()
    )
