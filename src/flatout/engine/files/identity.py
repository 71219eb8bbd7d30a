"""Identity of a run's source code, so that changed code counts as another run, and of
processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil


def source_of(module: str) -> Path | None:
    """File of a module; None if it is not found, which its import will report."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module)
        if spec and spec.origin and (file := Path(spec.origin)).is_file():
            return file
    return None


def sources_of(module: str) -> Iterable[Path]:
    """Files of a module: in a package also its siblings, which it may import."""
    file = source_of(module)
    if file is None:
        return []
    has_siblings = "." in module or file.name == "__init__.py"
    return file.parent.glob("*.py") if has_siblings else [file]


def digest_of(files: Iterable[Path]) -> str:
    """Digest of the files' contents, in order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def runs_since(pid: int, begin_s: float) -> bool:
    """Return whether process `pid` started at `begin_s` (seconds since 1970): process
    ids are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
