"""Whether compiled modules are kept: else each command compiles thousands anew."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from flatout.engine.diagnosis.finding import Finding

CHECK = "bytecode"


def bytecode(package: str = "torch", *, forbidden: bool | None = None) -> Finding:
    """`forbidden`: Python keeps no bytecode (PYTHONDONTWRITEBYTECODE); by default as
    in this process. Nothing is imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return Finding(CHECK, "ok", f"{package} has no source to compile")
    if Path(importlib.util.cache_from_source(found.origin)).exists():
        return Finding(CHECK, "ok", f"{package} is compiled")
    if not (sys.dont_write_bytecode if forbidden is None else forbidden):
        return Finding(CHECK, "ok", f"{package} is compiled on its first import")
    folder = Path(found.origin).parents[1]
    return Finding(
        CHECK,
        "warn",
        "PYTHONDONTWRITEBYTECODE is set and nothing is compiled: every command, worker "
        "and rank compiles its packages anew, for seconds",
        f"unset it, or once: python -m compileall -q -j 0 {folder}",
    )
