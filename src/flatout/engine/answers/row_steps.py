"""The rows of a step, and the steps of a row, of a past or coming run.

No log is needed: the order of rows is a permutation that is computed point by point,
and so is its inverse. Steps are numbered from 1, as in the log and in the history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.checkpoints.checkpoint_folder import FINISHED, RESULT
from flatout.engine.checkpoints.resume import differing, glimpse
from flatout.engine.parameters import SettingsError
from flatout.engine.train.recording.metrics_file import parse_point
from flatout.engine.train.setup.identity import SKIPPED, result_identity
from flatout.engine.train.setup.job import TrainJob

DECIDE = (
    "token rows",
    "train rows",
    "runtime.seed",
    "train.global_batch_size",
    SKIPPED,
)
"""Names in an identity that decide which rows a step has."""


def total_steps(job: TrainJob) -> int:
    train = job.settings.train
    return job.batches.total_steps(train.epochs, train.max_steps)


def rows_of_steps(job: TrainJob, steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (row, step) of the rows of `steps`. Raises SettingsError for a step that
    the run lacks."""
    total = total_steps(job)
    if outside := [step for step in steps if not 1 <= step <= total]:
        raise SettingsError(
            f"--step {outside[0]}: the run has the steps 1 to {total}; raise "
            "train.epochs or train.max_steps for more"
        )
    return [
        (row, step) for step in steps for row in job.batches.rows(step - 1).tolist()
    ]


def steps_of_row(job: TrainJob, row: int) -> list[int]:
    """Return the steps that train `row`. Raises SettingsError if there is no such
    row."""
    count = len(job.train)
    if not 0 <= row < count:
        raise SettingsError(
            f"--row {row}: the train rows have the numbers 0 to {count - 1}"
        )
    if row in job.batches.skipped:
        return []
    total, number = total_steps(job), np.array([row])
    epochs = range(math.ceil(total / job.batches.steps_per_epoch))
    steps = [int(job.batches.steps_of(number, epoch)[0]) + 1 for epoch in epochs]
    return [step for step in steps if step <= total]


def differences(job: TrainJob) -> list[str]:
    """Return what decides the rows of a step and was different in the last run that
    left a record in the job's folder; empty if nothing was."""
    now, before = result_identity(job), _last_identity(job.work_folder)
    names = [name for name in DECIDE if name in before]
    return differing({n: before[n] for n in names}, {n: now.get(n, []) for n in names})


def _last_identity(folder: Path) -> dict[str, Any]:
    for path in (folder / RESULT, folder / FINISHED):
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))["identity"]
            return {SKIPPED: [], **found}
    checkpoint = glimpse("auto", folder)  # does not tell which rows were skipped
    return checkpoint.manifest.identity if checkpoint else {}


def largest_rise(metrics_file: Path) -> tuple[range, str]:
    """Return the steps of the largest rise of the training loss, and its description.
    Raises SettingsError without one."""
    lines = metrics_file.read_bytes().splitlines() if metrics_file.is_file() else []
    found = [point for point in map(parse_point, lines) if point]
    losses = {p["step"]: p["metrics"].get("train_loss") for p in found}
    points = sorted((step, loss) for step, loss in losses.items() if loss is not None)
    rises = [
        (math.inf if math.isnan(after - before) else after - before, here, step)
        for (here, before), (step, after) in pairwise(points)
        if not after <= before
    ]
    if not rises:
        raise SettingsError(
            f"--spike: {metrics_file} has no loss that rises between two points; train "
            "first, or set train.log_every to fewer steps"
        )
    _, here, step = max(rises)
    description = (
        f"loss {losses[here]:.4f} at step {here}, {losses[step]:.4f} at step {step}"
    )
    return range(here + 1, step + 1), description
