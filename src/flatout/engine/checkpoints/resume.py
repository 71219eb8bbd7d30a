"""Choose the checkpoint from which a run resumes, and check that it fits the run."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.engine.checkpoints.checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Manifest,
    forget_finished,
    inside,
    newest_valid,
    open_checkpoint,
    read_manifest,
    set_aside,
    step_folders,
)
from flatout.engine.files.atomic_write import write_folder
from flatout.engine.parameters import Settings
from flatout.engine.parameters.common import by_path
from flatout.engine.parameters.other_names import REMOVED

logger = logging.getLogger(__name__)

LENGTHS = ("train.epochs", "train.max_steps")
"""The settings that may be increased before a stopped run is resumed."""


def resume_from(
    wanted: str, folder: Path, identity: dict[str, Any]
) -> Checkpoint | None:
    """Return the checkpoint from which the run resumes, or None. `wanted` is the value
    of `train.resume`, and `folder` contains the run's checkpoints. Checkpoints of later
    steps are hidden, so that later runs do not resume from them. Raises CheckpointError
    if the checkpoint cannot be used or belongs to a run with a different `identity`."""
    found, newest, best = _choose(wanted, folder), "", ""
    if found is not None:
        check_identity(found.folder, found.manifest, identity)
        if found.folder.parent.resolve() == folder.resolve():
            newest, best = found.folder.name, found.manifest.best or ""
    forget_finished(folder)
    late = [path for path in step_folders(folder) if path.name > newest]
    set_aside(late + [path for path in folder.glob("best-*") if path.name > best])
    if found is not None:
        _fetch_best(found, folder)
    return found


def _choose(wanted: str, folder: Path) -> Checkpoint | None:
    existing = step_folders(folder)
    if wanted == "never":
        if existing:
            logger.warning("train.resume: never: %s is not resumed", existing[0])
        return None
    if wanted != "auto":
        return open_named(wanted)
    found, faults = newest_valid(folder)
    for fault in faults:
        logger.warning("checkpoint skipped: %s", fault)
    if existing and found is None:
        raise CheckpointError(
            f"each of the {len(existing)} checkpoints in {folder} is damaged: "
            f"{'; '.join(faults)}. To start from the beginning, set train.resume: "
            "never"
        )
    return found


def _fetch_best(found: Checkpoint, folder: Path) -> None:
    """Copy the best model of checkpoint `found` to `folder` if it is missing there."""
    name = found.manifest.best
    if name is None or (folder / name).is_dir():
        return
    source = found.folder.parent / name
    if source.is_dir():
        files = [
            inside(source, "file", source, path.name)
            for path in source.iterdir()
            if not path.is_dir() or path.is_symlink()
        ]
        write_folder(
            folder / name,
            lambda hidden: [shutil.copy2(path, hidden) for path in files],
        )


def check_identity(
    folder: Path, found: Manifest, identity: dict[str, Any], *, log: bool = True
) -> None:
    """Raise CheckpointError if the manifest `found` differs from `identity` so much
    that the run cannot resume. Permitted differences are logged if `log` is true."""
    if differences := identity_faults(found.identity, identity):
        raise CheckpointError(
            f"{folder} was made by another training (then -> now): "
            f"{'; '.join(differences)}. {remedy(found.identity, identity)}, or set "
            "train.resume: never to start from the beginning"
        )
    raised = _raised(found.identity, identity) if log else {}
    for line in differing({n: found.identity[n] for n in raised}, raised):
        logger.warning(
            "%s: training continues, with learning rates for the new number of steps",
            line,
        )


def identity_faults(found: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Describe the differences between the identity `found` in a checkpoint and
    `identity`. A larger number of steps is permitted. If `found` lacks a setting
    because an older version of flatout wrote it, the default is assumed."""
    defaults = dict(by_path(Settings().model_dump(mode="json")))
    unknown = {n: defaults[n] for n in identity if n in defaults}
    # Earlier versions did not store a digest of a custom task's code.
    unknown |= {n: v for n, v in identity.items() if n.startswith("code of ")}
    # Earlier versions had more settings, which only matter if they were set.
    known = {n: v for n, v in found.items() if n in identity or v is not None}
    before = {**unknown, **known}
    return differing({**before, **_raised(before, identity)}, identity)


def remedy(found: dict[str, Any], identity: dict[str, Any]) -> str:
    """Return advice on how to resume the run with the identity `found`. If the run uses
    settings that have been removed, it can only be resumed with the earlier version."""
    removed = {
        name: REMOVED.get(name) or REMOVED.get(f"{name}={value}")
        for name, value in found.items()
        if value is not None and value != identity.get(name)
    }
    if not (told := [f"{name} ({use})" for name, use in removed.items() if use]):
        return "Set these back to resume it"
    return f"This version removed {', '.join(told)}: finish it with the earlier version"


def _raised(before: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in LENGTHS that are larger in `identity` than in `before`."""
    raised = {}
    for name in LENGTHS:
        earlier, now = before.get(name), identity[name]
        if earlier is not None and now is not None and now > earlier:
            raised[name] = now
    return raised


def find_checkpoint(wanted: str, folder: Path) -> Checkpoint | None:
    """Return the checkpoint from which `train.resume: <wanted>` would resume, or None.
    Unlike `resume_from`, this neither verifies the files nor logs messages."""
    if wanted == "never":
        return None
    named = folder if wanted == "auto" else Path(wanted)
    for candidate in [*step_folders(named), named]:
        try:
            return Checkpoint(candidate, read_manifest(candidate))
        except CheckpointError:
            continue
    return None


def open_named(wanted: str) -> Checkpoint:
    """Verify and return the checkpoint in the folder `wanted`, or the newest one if it
    contains several. Raises CheckpointError if there is none or it is damaged."""
    folder = Path(wanted)
    if not folder.is_dir():
        raise CheckpointError(
            f"train.resume: there is no folder {folder.absolute()}: give the folder "
            "of a checkpoint (step-...), auto or never"
        )
    newest = step_folders(folder)
    return open_checkpoint(newest[0] if newest else folder)


def resume_line(found: Checkpoint) -> str:
    manifest = found.manifest
    minutes = (time.time() - manifest.saved_s) / 60
    return (
        f"resuming from step {manifest.step} of {manifest.total_steps} "
        f"({found.folder}, saved {minutes:.0f} min ago)"
    )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each name whose value differs between `before` and `now`, for example
    `train.epochs: 3 -> 4`."""
    names = sorted({*before, *now})
    return [
        f"{name}: {before.get(name, 'absent')!r} -> {now.get(name, 'absent')!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]
