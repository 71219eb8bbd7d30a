"""Loss and gradient norm of single rows, by the weights of the nearest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from flatout.engine.answers.plain import Plain
from flatout.engine.checkpoints.checkpoint_folder import read_manifest, step_folders
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.assemble import seeded_model
from flatout.engine.train.setup.job import TrainJob

MODEL = "model.safetensors"


def replay(
    job: TrainJob, runtime: Runtime, rows: Sequence[int], step: int
) -> tuple[str, list[tuple[float, float]]]:
    """Return the name of the weights nearest to `step`, and for each row its mean loss
    and the norm of its gradient, in fp32 and without dropout. Raises SettingsError for
    a task whose rows have no separate loss, and without saved weights."""
    if job.task.whole_batch:
        raise SettingsError(
            f"--replay: a row of {job.settings.model.task} has no loss of its own, it "
            "is compared with the others of its batch; leave --replay out"
        )
    saved = dict(_saved(job.work_folder))
    if not saved:
        raise SettingsError(
            f"--replay: {job.work_folder} has no checkpoint and no model: train first, "
            "or set train.checkpoint.every_steps"
        )
    folder = saved[min(saved, key=lambda at: (abs(at - step), at))]
    model = _loaded(job, folder).to(runtime.device).eval()
    pad = job.vocabulary.pad_token_id if job.vocabulary else 0
    plain = Plain(model, job.task, job.train, job.settings.max_length, pad)
    return folder.name, [_replayed(plain, row) for row in rows]


def _replayed(plain: Plain, row: int) -> tuple[float, float]:
    plain.model.zero_grad(set_to_none=True)
    loss, divisor = 0.0, 0.0
    for part in plain.parts(np.array([row]), 0):
        part.loss.backward()  # type: ignore[no-untyped-call]
        loss, divisor = loss + part.loss.item(), divisor + part.divisor
    grads = [p.grad for p in plain.model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads))
    return loss / (divisor or 1.0), norm / (divisor or 1.0)


def _saved(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yield checkpoints and saved models with their steps."""
    if (folder / "last" / "config.json").is_file():
        yield float("inf"), folder / "last"
    for path in folder.glob("best-*"):
        yield int(path.name.removeprefix("best-")), path
    for path in step_folders(folder):
        yield read_manifest(path).step, path


def _loaded(job: TrainJob, folder: Path) -> Any:
    """Return the model of the training, including adapter and frozen parts, with
    weights from `folder`. Raises SettingsError if the weights belong to another model.
    """
    model = seeded_model(job)
    if (folder / "config.json").is_file():
        trusted = job.settings.model.trust_remote_code
        found = load_pretrained(folder, trust_remote_code=trusted, merge=False)
        weights = found.state_dict()
    elif (folder / MODEL).is_file():
        file = load_file(folder / MODEL)
        weights = {name.removeprefix("model."): value for name, value in file.items()}
    else:
        raise SettingsError(
            f"--replay: {folder} is in parts of several ranks (fsdp); let the training "
            "end, then its model is used"
        )
    # Tied weights, and those below an adapter, are not stored.
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise SettingsError(
            f"--replay: {folder} has weights that the configured model lacks, for "
            f"example {unknown[0]}: set the model as in that run"
        )
    return model
