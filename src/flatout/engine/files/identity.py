"""Identify processes, and the source code of a run, so that changed code makes it a
different run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil


def source_of(module: str) -> Path | None:
    """Return a module's file, or None if the module is not found."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module)
        if spec and spec.origin and (file := Path(spec.origin)).is_file():
            return file
    return None


def sources_of(module: str) -> Iterable[Path]:
    """Return the file of a module. If it is in a package, the other files of the
    package are included, because the module may import them."""
    file = source_of(module)
    if file is None:
        return []
    has_siblings = "." in module or file.name == "__init__.py"
    return file.parent.glob("*.py") if has_siblings else [file]


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the contents of the files, read in order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def runs_since(pid: int, begin_s: float) -> bool:
    """Return whether process `pid` is the process that started at `begin_s` (seconds
    since 1970). Process ids are reused, so the id alone is not enough."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
