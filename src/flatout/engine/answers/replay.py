"""Recompute the loss and gradient norm of single rows with saved weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.utils import get_total_norm

from flatout.engine.answers.plain import Plain
from flatout.engine.checkpoints.checkpoint_folder import step_folders
from flatout.engine.checkpoints.shards import load_whole
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import SettingsError
from flatout.engine.train.keeping.snapshots import MODEL
from flatout.engine.train.setup.assemble import seeded_model
from flatout.engine.train.setup.job import TrainJob


def replay(
    job: TrainJob, runtime: Runtime, rows: Sequence[int], step: int
) -> tuple[str, list[tuple[float, float]]]:
    """Load the saved weights whose step is nearest to `step`. Return the name of their
    folder and a pair (mean loss, gradient norm) for each of `rows`, computed in fp32
    and without dropout. Raises SettingsError if there are no saved weights, or if the
    task has no loss for a single row."""
    if job.task.whole_batch:
        raise SettingsError(
            f"--replay: a row of {job.settings.model.task} has no separate loss, "
            "because it is compared with the others of its batch; leave --replay out"
        )
    saved = _saved(job.work_folder)
    if not saved:
        raise SettingsError(
            f"--replay: {job.work_folder} has no checkpoint and no model: train first, "
            "or set train.checkpoint.every_steps"
        )
    folder = saved[min(saved, key=lambda at: (abs(at - step), at))]
    model = _loaded(job, folder).to(runtime.device).eval()
    plain = Plain(model, job.task, job.train, job.max_length)
    figures = []
    for row in rows:
        loss, _, divisor = plain.backward(np.array([row]))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        figures.append((loss, float(get_total_norm(grads)) / divisor))
    return folder.name, figures


def _saved(folder: Path) -> dict[float, Path]:
    """Return the folders of all checkpoints and saved models, with their steps as keys.
    The key of the final model is infinity."""
    numbered = [*folder.glob("best-*"), *step_folders(folder)]
    found = {float(path.name.partition("-")[2]): path for path in numbered}
    if (folder / "last" / "config.json").is_file():
        found[math.inf] = folder / "last"
    return found


def _loaded(job: TrainJob, folder: Path) -> Any:
    """Build the model of the run, including adapters and frozen parts, and load the
    weights from `folder`. Raises SettingsError if `folder` has weights that the model
    lacks."""
    model, trusted = seeded_model(job), job.settings.model.trust_remote_code
    if (folder / "config.json").is_file():
        saved = load_pretrained(folder, trust_remote_code=trusted, merge=False)
        weights = saved.state_dict()
    else:
        stored = load_whole(folder, MODEL)
        weights = {name.removeprefix("model."): value for name, value in stored.items()}
    # Tied weights and the base weights of an adapter are not stored.
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise SettingsError(
            f"--replay: {folder} has weights that the configured model lacks, for "
            f"example {unknown[0]}: set the model as in that run"
        )
    return model
