"""Report which rows a step trains on, and which steps train on a row.

This works for any run, even without a log: the order of rows in an epoch is a
permutation, and each element of the permutation and of its inverse can be computed
separately. Steps are numbered from 1, as in the log and in the history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.answers.replay import replay
from flatout.engine.checkpoints.checkpoint_folder import FINISHED, RESULT
from flatout.engine.checkpoints.resume import differing, find_checkpoint
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import RankedRows
from flatout.engine.train.recording.metrics_file import read_points
from flatout.engine.train.setup.identity import SKIPPED, result_identity
from flatout.engine.train.setup.job import TrainJob, cut, decoder, printable

DECIDE = (
    "token rows",
    "train rows",
    "runtime.seed",
    "train.global_batch_size",
    SKIPPED,
)
"""The keys of a run's identity that determine which rows a step trains on."""
SHOWN = 60
"""The number of characters to print of each text."""


def rows_of_steps(job: TrainJob, steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (row, step) for all rows of `steps`. Raises SettingsError if the run
    has no such step."""
    total = job.total_steps
    if outside := [step for step in steps if not 1 <= step <= total]:
        raise SettingsError(
            f"--step {outside[0]}: the run has the steps 1 to {total} with these "
            "settings; pass the --params of the run, or raise train.epochs or "
            "train.max_steps for more"
        )
    return [
        (row, step) for step in steps for row in job.batches.rows(step - 1).tolist()
    ]


def steps_of_row(job: TrainJob, row: int) -> list[int]:
    """Return the steps that train on `row`. Raises SettingsError if no such row
    exists."""
    count = len(job.train)
    if not 0 <= row < count:
        raise SettingsError(
            f"--row {row}: the training rows are numbered 0 to {count - 1}"
        )
    if row in job.batches.skipped:
        return []
    total, number = job.total_steps, np.array([row])
    epochs = range(math.ceil(total / job.batches.steps_per_epoch))
    steps = [int(job.batches.steps_of(number, epoch)[0]) + 1 for epoch in epochs]
    return [step for step in steps if step <= total]


def _last_identity(folder: Path) -> dict[str, Any]:
    for path in (folder / RESULT, folder / FINISHED):
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))["identity"]
            return {SKIPPED: [], **found}
    # A checkpoint does not record which rows were skipped.
    checkpoint = find_checkpoint("auto", folder)
    return checkpoint.manifest.identity if checkpoint else {}


def largest_rise(metrics_file: Path) -> tuple[range, str]:
    """Find the two successive points in `metrics_file` between which the training loss
    rises most. Return the steps after the first point, up to and including the second
    one, and a description. Raises SettingsError if the loss never rises."""
    found = [(p["step"], p["metrics"]) for p in read_points(metrics_file)]
    losses = {step: m["train_loss"] for step, m in found if "train_loss" in m}
    rises = {
        pair: math.inf if math.isnan(rise) else rise
        for pair in pairwise(sorted(losses))
        if not (rise := losses[pair[1]] - losses[pair[0]]) <= 0
    }
    if not rises:
        raise SettingsError(
            f"--spike: {metrics_file} has no loss that rises between two points; train "
            "first, or set train.log_every to fewer steps"
        )
    here, step = max(rises, key=lambda pair: (rises[pair], pair))
    description = (
        f"loss {losses[here]:.4f} at step {here}, {losses[step]:.4f} at step {step}"
    )
    return range(here + 1, step + 1), description


def row_lines(
    job: TrainJob, *, step: int | None, row: int | None, replays: bool, most: int
) -> list[str]:
    """Return lines that describe the rows of `step`, or `row`. If both are None, the
    rows at the largest rise in the loss are described. At most `most` rows are shown,
    with recomputed losses and gradient norms if `replays` is true. Raises SettingsError
    if there is nothing to show, or if losses of the last run are needed but it used
    different rows."""
    note = _other_rows(job, refused=replays or (step is None and row is None))
    head, rows, at = _select_rows(job, step, row)
    columns, figures = f"{'row':>9} {'step':>7} {'length':>6}", {}
    if replays:
        runtime, numbers = set_up(job.settings.runtime), [number for number, _ in rows]
        name, found = replay(job, runtime, numbers, at)
        losses = dict(zip(numbers, found, strict=True))
        rows.sort(key=lambda pair: -losses[pair[0]][0])
        figures = {n: f" {own[0]:9.4f} {own[1]:9.3g}" for n, own in losses.items()}
        columns += f" {'loss':>9} {'gradient':>9}"
        note.append(f"losses by the weights in {name}")
    decode = decoder(job)
    lines = [
        f"{number:9} {at or '':>7} {job.train.lengths(np.array([number]))[0]:6}"
        f"{figures.get(number, '')}  {_text(job, number, decode)}"
        for number, at in rows[:most]
    ]
    more = [f"and {len(rows) - most} more (--most)"] if len(rows) > most else []
    return [head, *note, f"{columns}  text", *lines, *more]


def _select_rows(
    job: TrainJob, step: int | None, row: int | None
) -> tuple[str, list[tuple[int, int]], int]:
    """Return a headline, pairs (row, step), and the step whose weights are used for a
    replay. If `row` is given, the step in its pair is 0."""
    if row is not None:
        steps = steps_of_row(job, row)
        shown = f"steps {', '.join(map(str, steps))}"
        if row in job.batches.skipped:
            shown = "no step: train.skip_rows leaves it out"
        elif not steps:
            shown = f"no step: the run ends at step {job.total_steps}, before it"
        head = f"row {row} is trained in {shown}"
        return head, [(row, 0)], max(steps, default=0)
    if step is not None:
        rows = rows_of_steps(job, [step])
        return f"step {step}: {len(rows)} rows", rows, step
    steps_of_rise, rise = largest_rise(job.metrics_file)
    rows = rows_of_steps(job, steps_of_rise)
    return f"{rise}: {len(rows)} rows", rows, steps_of_rise[0] - 1


def _other_rows(job: TrainJob, *, refused: bool) -> list[str]:
    """Return a note on the settings of the last run in the job's folder that gave its
    steps other rows. Raises SettingsError instead if `refused` is true."""
    now, before = result_identity(job), _last_identity(job.work_folder)
    names = [name for name in DECIDE if name in before]
    pair = {n: before[n] for n in names}, {n: now.get(n, []) for n in names}
    found = "; ".join(differing(*pair))
    if found and refused:
        raise SettingsError(
            f"the run in {job.work_folder} had other rows in its steps (then -> now): "
            f"{found}. Set these back, and make the same rows again (kedro run "
            "--pipelines=split,tokenize)"
        )
    return [f"These are not the rows of the last run: {found}"] if found else []


def _text(job: TrainJob, row: int, decode: Callable[..., str]) -> str:
    """Return the start of a row's text, preceded by its label if it has one."""
    text = cut(printable(job.train.readable(row, decode)), SHOWN)
    rows, names = job.train, job.label_names
    if not rows.has_labels or rows.has_token_labels:
        return text
    label = rows.labels_of(np.array([row]))[0]
    if isinstance(job.task, RankedRows):
        label = label[0]  # the second value is the query number
    if label.ndim:
        shown = " ".join(n for n, on in zip(names, label, strict=False) if on)
    else:
        shown = names[int(label)] if names else f"{float(label):g}"
    return f"[{shown}] {text}" if shown else text
