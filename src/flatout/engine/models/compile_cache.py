"""Whether a training's blocks lie compiled on the disk already: a mark beside them.

PyTorch finds compiled graphs again by keys that it has only after it has traced the
model. The mark lies in its folder and goes with it; its name is a digest of what these
keys depend on. One that is wrong costs seconds: what is missing is compiled.
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
"""Keys of a config that change no graph, beside those that begin with an underscore."""


@cache
def sources_digest() -> str:
    """Of what kernels and graphs are made from."""
    digest = hashlib.blake2s(digest_size=8)
    engine = Path(__file__).parents[1]
    for file in sorted([*engine.glob("models/*.py"), *engine.glob("ops/**/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def mark_of(config: Any, how: Mapping[str, Any]) -> Path:
    """Where the mark of a model of `config` lies, trained as `how` says (device,
    precision and whatever else chooses its kernels)."""
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
    """False too where the folder cannot be read."""
    try:
        return mark.is_file()
    except OSError:
        return False


def leave_mark(mark: Path) -> None:
    """A disk that is full costs the mark alone."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        logger.debug("no mark beside the compiled graphs: %s", error)
