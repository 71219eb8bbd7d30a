"""Identify processes, and the source code of a run. A run whose code has changed is
treated as a different run."""

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
    """Return the file of a module, or all Python files of its package's folder, because
    it may import them. Return an empty list if the module is not found."""
    file = source_of(module)
    if file is None:
        return []
    has_siblings = "." in module or file.name == "__init__.py"
    return file.parent.glob("*.py") if has_siblings else [file]


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the contents of the files, read in order of their names.
    Broken links, such as the lock files of Emacs, are left out."""
    digest = hashlib.sha256()
    for file in sorted(filter(Path.is_file, files)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def runs_since(pid: int, begin_s: float) -> bool:
    """Return whether the process that started at `begin_s` (seconds since 1970) with
    the ID `pid` still exists. The ID alone is not enough, because IDs are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
