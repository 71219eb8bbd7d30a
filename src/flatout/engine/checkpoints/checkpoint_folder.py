"""Write, verify and remove checkpoint folders.

A checkpoint is written to a folder with a hidden name. The manifest, which contains the
size and hash of each file, is written last. The folder is then flushed to disk and
renamed, so a folder named `step-...` is always complete. This module does not import
torch, so that Kedro hooks can quickly check for an interrupted run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from flatout.engine.files.atomic_write import (
    child,
    clear_leftovers,
    remove,
    write_folder,
)
from flatout.engine.files.content_key import file_hash

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RESULT = "result.json"
"""The file that contains the result of a finished run until the caller has saved it."""
FINISHED = "finished.json"
"""The new name of RESULT once the caller has saved the result. A repetition of the run
returns the result from this file."""
FORMAT = 1


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be used or a folder cannot store checkpoints."""

    exit_code = 2


@dataclass(frozen=True)
class Manifest:
    """Information about a checkpoint that can be read without loading tensors."""

    step: int
    """The number of completed steps, which is also the index of the next step."""
    total_steps: int
    world_size: int
    identity: dict[str, Any]
    """The settings and dataset keys that determine the result of the run, by name."""
    best: str | None
    """The folder name of the best model up to this step, or None if there is none."""
    versions: dict[str, str] = field(default_factory=dict)
    accelerated: dict[str, Any] = field(default_factory=dict)
    """The optimisations that the run used, and the device that it ran on."""
    saved_s: float = field(default_factory=time.time)
    """The time at which the checkpoint was written, as a Unix timestamp."""
    files: dict[str, list[Any]] = field(default_factory=dict)
    """The size in bytes and the xxh3 hash of each file, by file name."""
    format: int = FORMAT

    def text(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields, "digest": _digest(fields)}, indent=1)

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Parse a manifest that `text` wrote. Raises ValueError if it was changed or
        has an unknown format."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("digest", 0) != _digest(fields):
            raise ValueError("it was changed after it was written")
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}; this version reads {FORMAT}")
        found = cls(**fields)
        if not isinstance(found.step, int) or not isinstance(found.files, dict):
            raise ValueError("`step` must be an integer, `files` a table")
        return found


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    manifest: Manifest


def step_folder(step: int) -> str:
    return f"step-{step:09d}"


def best_folder(step: int) -> str:
    return f"best-{step:09d}"


def write_checkpoint(
    folder: Path, manifest: Manifest, fill: Callable[[Path], list[str]]
) -> Checkpoint:
    """Write a checkpoint to `folder/step-...`. `fill` writes the files to the folder
    that is passed to it and returns their names. The manifest is written last."""
    target = folder / step_folder(manifest.step)

    def fill_and_list(hidden: Path) -> None:
        for name in fill(hidden):
            path = hidden / name
            manifest.files[name] = [path.stat().st_size, file_hash(path)]
        (hidden / MANIFEST).write_text(manifest.text(), encoding="utf-8")

    write_folder(target, fill_and_list)
    return Checkpoint(target, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in `folder`. Raises CheckpointError if it is not valid."""
    path = folder / MANIFEST
    try:
        found = Manifest.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if found.best is not None:
        inside(path, "best", folder.parent, found.best)
    for name in found.files:
        inside(path, "files", folder, name)
    return found


def inside(file: Path, key: str, folder: Path, name: Any) -> Path:
    """Return the path of the file `name` in `folder`. Raises CheckpointError if this
    path is outside `folder`. The message says that `key` in `file` contains `name`."""
    try:
        return child(folder, name)
    except ValueError as error:
        raise CheckpointError(f"{file} is refused: {key}: {error}") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Verify and return a checkpoint. Raises CheckpointError if a file is missing or
    damaged."""
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            fault = _fault(path, size, digest)
        except OSError as error:  # a disk error or a missing permission
            fault = f"cannot be read ({error.strerror or error})"
        if fault is not None:
            raise CheckpointError(f"{path} {fault}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path} is not in {MANIFEST}")
    return Checkpoint(folder, manifest)


def _fault(path: Path, size: int, digest: str) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if found != size:
        return f"has {found} bytes instead of {size}"
    return None if file_hash(path) == digest else "was changed after it was written"


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint, if any, and the errors in any newer ones."""
    faults: list[str] = []
    for candidate in step_folders(folder):
        try:
            return open_checkpoint(candidate), faults
        except CheckpointError as error:
            faults.append(str(error))
    return None, faults


def is_interrupted(folder: Path) -> bool:
    """Return whether `train.resume: auto` would resume a run in `folder`."""
    return bool(step_folders(folder)) or (folder / RESULT).is_file()


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove old checkpoints and best models. The newest `keep` checkpoints are kept
    with their best models. The best model `best` and newer ones are also kept, because
    the checkpoint that refers to them may not be written yet."""
    kept, surplus = step_folders(folder)[:keep], step_folders(folder)[keep:]
    named = set()
    for path in kept:
        with suppress(CheckpointError):
            named.add(read_manifest(path).best)
    old_best = [
        path
        for path in folder.glob("best-*")
        if path.name < (best or "") and path.name not in named
    ]
    for path in [*surplus, *old_best]:
        discard(path)
    _remove_discarded(folder)


def discard(path: Path) -> None:
    """Hide a folder, then remove it, so that no process uses an incomplete folder."""
    shutil.rmtree(_hide(path), ignore_errors=True)


def _hide(path: Path) -> Path:
    return path.rename(path.with_name(f".old-{path.name}-{uuid.uuid4().hex}"))


def clear_all_leftovers(folder: Path) -> None:
    """Remove temporary files of killed runs. The caller must have locked the folder."""
    clear_leftovers(folder, alone=True)
    _remove_discarded(folder)


def _remove_discarded(folder: Path) -> None:
    """Remove folders that `set_aside` hid or whose removal was interrupted."""
    for path in folder.glob(".old-*"):
        remove(path)


def set_aside(paths: list[Path]) -> None:
    """Hide checkpoints from later runs. Writing the next checkpoint removes them."""
    for path in paths:
        _hide(path)


def finish(folder: Path) -> None:
    """Remove the checkpoints in `folder` after the result of the run has been saved.
    The best model and the last model are kept, in case the same run is repeated."""
    path = folder / RESULT
    best = None
    if path.is_file():
        best = json.loads(path.read_text(encoding="utf-8"))["model_folder"]
    prune(folder, 0, best)
    if best is not None:
        os.replace(path, folder / FINISHED)


def forget_finished(folder: Path) -> None:
    """Remove the results of earlier runs from `folder`, because a new run begins."""
    for name in (RESULT, FINISHED):
        (folder / name).unlink(missing_ok=True)


def was_trained_now(folder: Path) -> bool:
    """Return whether `folder` has a result that the caller has not saved yet."""
    return (folder / RESULT).is_file()
