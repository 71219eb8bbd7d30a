"""Compiled graphs and kernels in one file, for another machine of the same kind.

PyTorch and Triton find them again by what they were made from, wherever the folder
lies. `torch.compiler.save_cache_artifacts` has the graphs of one process alone, and
neither the C++ kernels of a CPU nor kernels that were launched outside of a graph.

What is carried is run as code. So the file is for machines that trust where it comes
from: its sums tell one that is torn, not one that was made with intent.
"""

from __future__ import annotations

import json
import os
import platform
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from flatout.engine.files.atomic_write import write_file
from flatout.engine.machine.environment import (
    compile_cache_folder,
    cpu_instructions,
    cpu_name,
    device_name,
    triton_cache_folder,
)
from flatout.engine.models.compile_cache import sources_digest

MANIFEST = "manifest.json"
FORMAT = 1
CPU = "CPU"
GROUP = "__grp__"
"""A file of Triton that names others by their whole paths."""


TORN = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(zipfile.BadZipFile, zlib.error, EOFError),
    RuntimeError,  # encrypted, or compressed in a way that is not ours
)
"""What a file gives that is none of ours, or no longer whole."""


class CacheFileError(ValueError):
    """A file of compiled graphs that cannot be used here, or not be written."""

    exit_code = 2


@dataclass(frozen=True)
class Carried:
    """What was written, or taken."""

    files: int
    bytes: int


def export_cache(file: Path) -> Carried:
    """Write all that is compiled on this machine to `file`. Raises CacheFileError."""
    found = [
        (f"{name}/{path.relative_to(folder).as_posix()}", path)
        for name, folder in _folders().items()
        for path in _kept(folder)
    ]
    if not found:
        places = " and ".join(map(str, _folders().values()))
        raise CacheFileError(f"nothing is compiled in {places}: train once before")
    sizes: dict[str, list[Any]] = {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, lambda hidden: _write(hidden, found, sizes))
    except OSError as error:
        raise CacheFileError(f"{file} cannot be written ({error})") from None
    return Carried(len(sizes), sum(size for size, _ in sizes.values()))


def import_cache(file: Path) -> Carried:
    """Put what `file` holds where PyTorch and Triton look; what lies there already
    stays. Raises CacheFileError before anything is written, where it was made by other
    versions or for another device, is torn, or names files outside of it."""
    try:
        with zipfile.ZipFile(file) as opened:
            manifest = _manifest(opened)
            _check_made_here(file, manifest)
            sizes = manifest["files"]
            targets = _checked_targets(opened, sizes)
            missing = {n: path for n, path in targets.items() if not path.exists()}
            for name, path in missing.items():
                content = _placed(path, _content(opened, name, sizes[name][0]))
                _write_whole(path, content)
    except CacheFileError:
        raise
    except OSError as error:
        raise CacheFileError(
            f"{file} cannot be read, or its content not be written ({error}): correct "
            "the path, or make room"
        ) from None
    except TORN as error:
        raise CacheFileError(
            f"{file} is torn, or no file of `kedro flatout compile-cache export` "
            f"({error}): write it again. Nothing of it was taken"
        ) from None
    return Carried(len(missing), sum(sizes[name][0] for name in missing))


def made_by() -> dict[str, str]:
    """What must be the same for compiled code to be found again, and to run."""
    return {
        "flatout's kernels": sources_digest(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "device": device_name(),
        CPU: _cpu(),
    }


def _cpu() -> str:
    instructions = " ".join(cpu_instructions()).encode()
    return f"{cpu_name()} with instructions {_digest(instructions)[:8]}"


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "none"


def _folders() -> dict[str, Path]:
    return {"inductor": compile_cache_folder(), "triton": triton_cache_folder()}


def _kept(folder: Path) -> Iterator[Path]:
    """Files of `folder`, links and what serves running processes left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_passing = "locks" in parts or any(p.startswith("tmp.") for p in parts)
        if is_passing or path.suffix in (".lock", ".tmp") or path.is_symlink():
            continue
        if path.is_file():
            yield path


def _write(
    hidden: Path, found: list[tuple[str, Path]], sizes: dict[str, list[Any]]
) -> None:
    with zipfile.ZipFile(hidden, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, path in found:
            with suppress(FileNotFoundError):  # another process tidied up
                content = path.read_bytes()
                opened.writestr(name, content)
                sizes[name] = [len(content), _digest(content)]
        manifest = {"format": FORMAT, "made_by": made_by(), "files": sizes}
        opened.writestr(MANIFEST, json.dumps(manifest))


def _manifest(opened: zipfile.ZipFile) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(opened.read(MANIFEST))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    if sorted([*manifest["files"], MANIFEST]) != sorted(opened.namelist()):
        raise ValueError("its table and its files are not the same")
    return manifest


def _check_made_here(file: Path, manifest: Mapping[str, Any]) -> None:
    theirs, ours = manifest["made_by"], made_by()
    if not any(map(_is_for_the_cpu, manifest["files"])):
        del ours[CPU]  # a GPU's, whatever its host
    differ = [
        f"{name} {theirs.get(name)} (here {value})"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if differ:
        raise CacheFileError(
            f"{file} was made with {', '.join(differ)}: it is of no use here, and "
            "nothing of it was taken. Export it on a machine like this one"
        )


def _is_for_the_cpu(name: str) -> bool:
    """Libraries that PyTorch builds for one CPU; those of Triton launch kernels."""
    place = PurePosixPath(name)
    return place.suffix == ".so" and "triton" not in place.parts[:2]


def _checked_targets(
    opened: zipfile.ZipFile, sizes: Mapping[str, list[Any]]
) -> dict[str, Path]:
    """Where each file goes. Raises one of TORN where any of them cannot be placed."""
    targets = {name: _target(name) for name in sizes}
    for name, (size, digest) in sizes.items():
        content = _content(opened, name, size)
        if _digest(content) != digest:
            raise ValueError(f"{name} is another than when it was written")
        _placed(targets[name], content)
    return targets


def _target(name: str) -> Path:
    """Raises ValueError where the name leads out of the folder of its kind."""
    kind, *parts = PurePosixPath(name).parts
    folder = _folders()[kind]
    path = folder.joinpath(*parts)
    plain = parts and not {"..", "/"} & set(parts) and not set(name) & {"\\", "\0", ":"}
    root = Path(os.path.realpath(folder))
    if not plain or not Path(os.path.realpath(path)).is_relative_to(root):
        raise ValueError(f"{name!r} leads out of {folder}")
    return path


def _content(opened: zipfile.ZipFile, name: str, size: int) -> bytes:
    """Raises ValueError where the file is not `size` bytes long."""
    with opened.open(name) as stream:
        content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"{name} has not its {size} bytes")
    return content


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _placed(path: Path, content: bytes) -> bytes:
    """As `content` is where it lies at `path`."""
    is_group = path.name.startswith(GROUP)
    return _moved(content, path.parent) if is_group else content


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda hidden: hidden.write_bytes(content))


def _moved(content: bytes, folder: Path) -> bytes:
    """Triton's table of a kernel's files, which lie in `folder` now."""
    group = json.loads(content)
    paths = group["child_paths"]
    if isinstance(paths, dict):
        group["child_paths"] = {name: str(folder / Path(name).name) for name in paths}
    return json.dumps(group).encode()
