"""Text of the answers about rows and steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flatout.engine.answers.replay import replay
from flatout.engine.answers.row_steps import (
    differences,
    largest_rise,
    rows_of_steps,
    steps_of_row,
    total_steps,
)
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import RankedRows
from flatout.engine.train.recording.one_line import cut, printable
from flatout.engine.train.setup.job import TrainJob, decoder

SHOWN = 60
"""Characters of a text."""


def row_lines(
    job: TrainJob, *, step: int | None, row: int | None, replays: bool, most: int
) -> list[str]:
    """Return the lines about `step`, or `row`, or, without both, the largest rise of
    the loss. Raises SettingsError for what is not there."""
    note = _other_rows(job, refused=replays or (step is None and row is None))
    head, rows, at = _asked(job, step, row)
    columns, figures = f"{'row':>9} {'step':>7} {'length':>6}", [""] * len(rows)
    if replays:
        runtime, numbers = set_up(job.settings.runtime), [number for number, _ in rows]
        name, found = replay(job, runtime, numbers, at)
        order = sorted(range(len(rows)), key=lambda n: -found[n][0])
        rows = [rows[n] for n in order]
        figures = [f" {found[n][0]:9.4f} {found[n][1]:9.3g}" for n in order]
        columns += f" {'loss':>9} {'gradient':>9}"
        note.append(f"losses by the weights in {name}")
    decode, shown = decoder(job), [*zip(rows, figures, strict=True)][:most]
    lines = [
        f"{number:9} {at or '':>7} {job.train.lengths(np.array([number]))[0]:6}{own}  "
        f"{_text(job, number, decode)}"
        for (number, at), own in shown
    ]
    more = [f"and {len(rows) - most} more (--most)"] if len(rows) > most else []
    return [head, *note, f"{columns}  text", *lines, *more]


def _asked(
    job: TrainJob, step: int | None, row: int | None
) -> tuple[str, list[tuple[int, int]], int]:
    """Return a headline, (row, step) of the rows, with step 0 for all steps, and the
    step of whose weights a replay is."""
    if row is not None:
        steps = steps_of_row(job, row)
        shown = ", ".join(map(str, steps))
        if row in job.batches.skipped:
            shown = "none: train.skip_rows leaves it out"
        elif not steps:
            shown = f"none: the run ends at step {total_steps(job)}, before it"
        head = f"row {row} is trained in steps {shown}"
        return head, [(row, 0)], max(steps, default=0)
    if step is not None:
        rows = rows_of_steps(job, [step])
        return f"step {step}: {len(rows)} rows", rows, step
    steps_of_rise, rise = largest_rise(job.metrics_file)
    rows = rows_of_steps(job, steps_of_rise)
    return f"{rise}: {len(rows)} rows", rows, steps_of_rise[0] - 1


def _other_rows(job: TrainJob, *, refused: bool) -> list[str]:
    found = "; ".join(differences(job))
    if found and refused:
        raise SettingsError(
            f"the run in {job.work_folder} had other rows in its steps (then -> now): "
            f"{found}. Set these back, and make the same rows again (kedro run "
            "--pipelines=split,tokenize)"
        )
    return [f"These are not the rows of the last run: {found}"] if found else []


def _text(job: TrainJob, row: int, decode: Callable[..., str]) -> str:
    """Return the start of a row's text, after the label of a row that has one."""
    text = cut(printable(job.train.readable(row, decode)), SHOWN)
    rows, names = job.train, job.label_names
    if not rows.has_labels or rows.has_token_labels:
        return text
    label = rows.labels_of(np.array([row]))[0]
    if isinstance(job.task, RankedRows):
        label = label[0]  # the other number is the query's
    if label.ndim:
        shown = " ".join(n for n, on in zip(names, label, strict=False) if on)
    else:
        shown = names[int(label)] if names else f"{float(label):g}"
    return f"[{shown}] {text}" if shown else text
