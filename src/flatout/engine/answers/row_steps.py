"""The rows of a step, and the steps of a row, of a past or coming run.

No log is needed: the order of rows is a permutation that is computed point by point,
and so is its inverse. Steps are numbered from 1, as in the log and in the history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.checkpoints.checkpoint_folder import FINISHED, RESULT
from flatout.engine.checkpoints.resume import differing, glimpse
from flatout.engine.tasks import RankedRows
from flatout.engine.train.setup.identity import SKIPPED, result_identity
from flatout.engine.train.setup.job import TrainJob, decoder
from flatout.engine.train.wrong_rows import cut, printable

DECIDE = ("token rows", "train rows", "runtime.seed", "train.global_batch_size")
"""Names in an identity that decide which rows a step has."""
SHOWN = 60
"""Characters of a text."""


class RowsError(ValueError):
    """A question about rows or steps that do not exist; the text has the remedy."""


@dataclass(frozen=True)
class Row:
    """A row for people to read."""

    row: int
    """Number in the train rows."""
    length: int
    label: str
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Jump:
    """The largest rise of the loss between two points of a history."""

    before: int
    """Step of the point before."""
    after: int
    loss_before: float
    loss_after: float

    @property
    def steps(self) -> range:
        return range(self.before + 1, self.after + 1)


def total_steps(job: TrainJob) -> int:
    train = job.settings.train
    return job.batches.total_steps(train.epochs, train.max_steps)


def rows_of_steps(job: TrainJob, steps: Sequence[int]) -> list[Row]:
    """Return the rows of `steps`. Raises RowsError for a step that the run lacks."""
    total = total_steps(job)
    for step in steps:
        if not 1 <= step <= total:
            raise RowsError(
                f"--step {step}: the run has the steps 1 to {total}; raise "
                "train.epochs or train.max_steps for more"
            )
    rows = [job.batches.rows(step - 1).tolist() for step in steps]
    pairs = zip(steps, rows, strict=True)
    return [row for step, own in pairs for row in readable(job, own, step)]


def steps_of_row(job: TrainJob, row: int) -> list[int]:
    """Return the steps that train `row`. Raises RowsError if there is no such row."""
    count = len(job.train)
    if not 0 <= row < count:
        raise RowsError(
            f"--row {row}: the train rows have the numbers 0 to {count - 1}"
        )
    if row in job.batches.skipped:
        return []
    total = total_steps(job)
    epochs = range(math.ceil(total / job.batches.steps_per_epoch))
    number = np.array([row])
    steps = [int(job.batches.steps_of(number, epoch)[0]) + 1 for epoch in epochs]
    return [step for step in steps if step <= total]


def readable(job: TrainJob, rows: Sequence[int], step: int | None = None) -> list[Row]:
    """Return `rows`, which a step has, for people to read."""
    decode, lengths = decoder(job), job.train.lengths(np.array(rows))
    texts = [cut(printable(job.train.readable(r, decode)), SHOWN) for r in rows]
    labels = [_label(job, np.array([row])) for row in rows]
    found = zip(rows, lengths.tolist(), labels, texts, strict=True)
    return [Row(*facts, step) for facts in found]


def _label(job: TrainJob, number: Any) -> str:
    """Return the label of a row that has one; of several, their names."""
    rows, names = job.train, job.label_names
    if not rows.has_labels or rows.has_token_labels:
        return ""
    label = rows.labels_of(number)[0]
    if isinstance(job.task, RankedRows):
        label = label[0]  # the other number is the query's
    if label.ndim:
        return " ".join(n for n, on in zip(names, label, strict=False) if on)
    return names[int(label)] if names else f"{float(label):g}"


def differences(job: TrainJob) -> list[str]:
    """Return what decides the rows of a step and was different in the last run that
    left a record in the job's folder; empty if nothing was."""
    now, before = result_identity(job), _last_identity(job.work_folder)
    if before is None:
        return []
    names = [name for name in (*DECIDE, SKIPPED) if name in before]
    return differing({n: before[n] for n in names}, {n: now.get(n, []) for n in names})


def _last_identity(folder: Path) -> dict[str, Any] | None:
    for name in (RESULT, FINISHED):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))["identity"]
            return {SKIPPED: [], **found}
    checkpoint = glimpse("auto", folder)  # does not tell which rows were skipped
    return checkpoint.manifest.identity if checkpoint else None


def check_unchanged(job: TrainJob) -> None:
    """Raise RowsError if the last run's steps had other rows than the job's."""
    if found := differences(job):
        raise RowsError(
            f"the run in {job.work_folder} had other rows in its steps (then -> now): "
            f"{'; '.join(found)}. Set these back, and make the same rows again (kedro "
            "run --pipelines=split,tokenize)"
        )


def largest_jump(metrics_file: Path) -> Jump:
    """Return the largest rise of the training loss. Raises RowsError without one."""
    points = dict(_losses(metrics_file)) if metrics_file.is_file() else {}
    steps = sorted(points)
    pairs = [Jump(a, b, points[a], points[b]) for a, b in pairwise(steps)]
    rises = [one for one in pairs if not one.loss_after <= one.loss_before]
    if not rises:
        raise RowsError(
            f"--spike: {metrics_file} has no loss that rises between two points; train "
            "first, or set train.log_every to fewer steps"
        )
    return max(rises, key=_rise)


def _rise(jump: Jump) -> float:
    rise = jump.loss_after - jump.loss_before
    return math.inf if math.isnan(rise) else rise


def _losses(metrics_file: Path) -> Any:
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        try:
            point = json.loads(line)
            yield int(point["step"]), float(point["metrics"]["train_loss"])
        except (ValueError, KeyError, TypeError):
            continue  # another kind of point, or a line that a kill truncated
