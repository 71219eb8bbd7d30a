"""Folders of checkpoints on the disk: whole or absent, sound or passed over.

A checkpoint is written under a hidden name, its manifest (sizes and hashes of all
files) last, brought to the disk, and renamed: a folder `step-...` is always whole.
No torch here, so that Kedro's side can ask whether a run was interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RESULT = "result.json"
"""What a finished run hands over; it lies there until somebody has taken it."""
FORMAT = 1
CHUNK_BYTES = 1 << 24


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a folder that cannot hold any."""

    exit_code = 2


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its tensors."""

    step: int
    """Steps done: training goes on with this one, counted from 0."""
    total_steps: int
    world_size: int
    identity: dict[str, Any]
    """The settings and the data that decide what is trained, by name."""
    best: str | None
    """Name of the folder with the best model up to here."""
    versions: dict[str, str] = field(default_factory=dict)
    saved_s: float = field(default_factory=time.time)
    """Seconds since 1970."""
    files: dict[str, list[Any]] = field(default_factory=dict)
    """File name -> [bytes, xxh3 hash]."""
    format: int = FORMAT

    def text(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields, "digest": _digest(fields)}, indent=1)

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Raises ValueError where the text is not what `text` wrote."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("digest", 0) != _digest(fields):
            raise ValueError("it was changed after it was written")
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}; this version reads {FORMAT}")
        return cls(**fields)


def _digest(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    manifest: Manifest


def step_folder(step: int) -> str:
    return f"step-{step:09d}"


def best_folder(step: int) -> str:
    return f"best-{step:09d}"


def write_whole(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a hidden folder and put it in `target`'s place.
    Whatever goes wrong, what was at `target` before is untouched."""
    hidden = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex}")
    try:
        hidden.mkdir(parents=True)
        fill(hidden)
        for path in hidden.iterdir():
            sync(path)
        sync(hidden)
        put_in_place(hidden, target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def put_in_place(hidden: Path, target: Path) -> None:
    old = target.with_name(f".old-{target.name}-{uuid.uuid4().hex}")
    if target.exists():
        os.rename(target, old)
    os.rename(hidden, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text_whole(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never a part."""
    hidden = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex}")
    hidden.write_text(text, encoding="utf-8")
    sync(hidden)
    os.replace(hidden, path)
    sync(path.parent)


def write_checkpoint(
    folder: Path, manifest: Manifest, fill: Callable[[Path], None]
) -> Checkpoint:
    """Files of `fill` and their manifest as `folder/step-...`."""
    target = folder / step_folder(manifest.step)

    def fill_and_seal(hidden: Path) -> None:
        fill(hidden)
        for path in sorted(hidden.iterdir()):
            sync(path)
            manifest.files[path.name] = [path.stat().st_size, file_hash(path)]
        (hidden / MANIFEST).write_text(manifest.text(), encoding="utf-8")

    write_whole(target, fill_and_seal)
    return Checkpoint(target, manifest)


def file_hash(path: Path) -> str:
    """xxh3 (128 bits) of a file, hexadecimal; it guards against damage, not attack."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError where there is none that can be read."""
    try:
        return Manifest.parse((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: {error}") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check every file. Raises CheckpointError that names the fault."""
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            fault = _fault(path, size, digest)
        except OSError as error:  # a disk that fails, a right that is missing
            fault = f"cannot be read ({error.strerror or error})"
        if fault is not None:
            raise CheckpointError(f"{path} {fault}")
    return Checkpoint(folder, manifest)


def _fault(path: Path, size: int, digest: str) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if found != size:
        return f"has {found} bytes in place of {size}"
    return None if file_hash(path) == digest else "was changed after it was written"


def step_folders(folder: Path) -> list[Path]:
    """Checkpoints under `folder`, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def newest_sound(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint without a fault, and the faults of newer ones."""
    faults: list[str] = []
    for candidate in step_folders(folder):
        try:
            return open_checkpoint(candidate), faults
        except CheckpointError as error:
            faults.append(str(error))
    return None, faults


def is_interrupted(folder: Path) -> bool:
    """Whether `folder` holds a run that the next `resume: auto` goes on with."""
    return bool(step_folders(folder)) or (folder / RESULT).is_file()


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Leave the newest `keep` checkpoints, the best models that they name, and all
    from `best` on: a better one may be on its way."""
    kept, surplus = step_folders(folder)[:keep], step_folders(folder)[keep:]
    named = {_best_of(path) for path in kept}
    old_best = [
        path
        for path in folder.glob("best-*")
        if path.name < (best or "") and path.name not in named
    ]
    for path in [*surplus, *old_best]:
        discard(path)
    sweep(folder, ".old-*")


def _best_of(folder: Path) -> str | None:
    try:
        return read_manifest(folder).best
    except CheckpointError:
        return None


def discard(path: Path) -> None:
    """Remove a folder; if that is cut short, what is left has a hidden name."""
    hidden = path.with_name(f".old-{path.name}-{uuid.uuid4().hex}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(folder: Path, pattern: str) -> None:
    """Remove hidden rests: `.tmp-*` of writes and `.old-*` of removals cut short."""
    for path in folder.glob(pattern):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def set_aside(paths: list[Path]) -> None:
    """Hide checkpoints that are not gone on with; the next one written sweeps them."""
    for path in paths:
        os.rename(path, path.with_name(f".old-{path.name}-{uuid.uuid4().hex}"))


def finish(folder: Path) -> None:
    """Nothing is left to resume from: called when a run's results are in good hands.
    The best model and the last one stay."""
    path = folder / RESULT
    best = None
    if path.is_file():
        best = json.loads(path.read_text(encoding="utf-8"))["model_folder"]
    prune(folder, 0, best)
    path.unlink(missing_ok=True)
