"""Marks in PyTorch's cache for models whose blocks have been compiled.

PyTorch can look up compiled graphs only after it has traced the model. The mark is in
its cache folder and removed with it; its name is a digest of the inputs of these keys.
A wrong mark costs seconds: missing graphs are compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flatout.engine.machine.environment import compile_cache_folder

logger = logging.getLogger(__name__)

NOT_COMPILED = ("transformers_version",)
"""Config keys that change no graph, except those that begin with an underscore."""


@cache
def sources_digest() -> str:
    """Digest of the sources of kernels and graphs."""
    digest = hashlib.blake2s(digest_size=8)
    engine = Path(__file__).parents[1]
    for file in sorted([*engine.glob("models/*.py"), *engine.glob("ops/**/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def mark_of(config: Any, how: Mapping[str, Any]) -> Path:
    """Path of the mark for a model of `config`, trained with `how` (device, precision
    and everything else that selects its kernels)."""
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, bool | int | float | str)
        and not name.startswith("_")
        and name not in NOT_COMPILED
    }
    versions = [version("torch"), sources_digest()]
    text = json.dumps([shape, dict(how), versions], sort_keys=True, default=str)
    name = hashlib.blake2s(text.encode(), digest_size=16).hexdigest()
    return compile_cache_folder() / "flatout" / name


def is_marked(mark: Path) -> bool:
    """Return whether the mark exists; False if the folder cannot be read."""
    try:
        return mark.is_file()
    except OSError:
        return False


def leave_mark(mark: Path) -> None:
    """Create the mark; if the disk is full, only the mark is missing."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        logger.debug("no mark written for the compiled graphs: %s", error)
