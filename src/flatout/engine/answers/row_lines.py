"""Text of the answers about rows and steps."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.engine.answers.replay import replay
from flatout.engine.answers.row_steps import (
    Row,
    check_unchanged,
    differences,
    largest_jump,
    readable,
    rows_of_steps,
    steps_of_row,
    total_steps,
)
from flatout.engine.machine.runtime import set_up
from flatout.engine.train.setup.job import TrainJob


def row_lines(
    job: TrainJob, *, step: int | None, row: int | None, replays: bool, most: int
) -> list[str]:
    """Return the lines about `step`, or `row`, or, without both, the largest rise of
    the loss. Raises RowsError."""
    note = []
    if replays or (step is None and row is None):
        check_unchanged(job)
    elif found := differences(job):
        note = [f"These are not the rows of the last run: {'; '.join(found)}"]
    if row is not None:
        steps = steps_of_row(job, row)
        shown, at = ", ".join(map(str, steps)), steps[-1] if steps else 0
        if row in job.batches.skipped:
            shown = "none: train.skip_rows leaves it out"
        elif not steps:
            shown = f"none: the run ends at step {total_steps(job)}, before it"
        table = _table(job, readable(job, [row]), at, replays=replays, most=most)
        return [f"row {row} is trained in steps {shown}", *note, *table]
    if step is not None:
        rows, head, at = rows_of_steps(job, [step]), f"step {step}", step
    else:
        jump = largest_jump(job.metrics_file)
        rows, at = rows_of_steps(job, jump.steps), jump.before
        head = (
            f"loss {jump.loss_before:.4f} at step {jump.before}, {jump.loss_after:.4f} "
            f"at step {jump.after}"
        )
    head = f"{head}: {len(rows)} rows"
    return [head, *note, *_table(job, rows, at, replays=replays, most=most)]


def _table(
    job: TrainJob, rows: Sequence[Row], step: int, *, replays: bool, most: int
) -> list[str]:
    """Return a line per row; with `replays` by the weights nearest to `step`."""
    more = [f"and {len(rows) - most} more (--most)"] if len(rows) > most else []
    columns = f"{'row':>9} {'step':>7} {'length':>6}"
    if not replays:
        return [f"{columns}  text", *map(_line, rows[:most]), *more]
    name, found = replay(job, set_up(job.settings.runtime), rows, step)
    head = f"{columns} {'loss':>9} {'gradient':>9}  text"
    lines = (
        _line(own.row, f" {own.loss:9.4f} {own.gradient_norm:9.3g}")
        for own in found[:most]
    )
    return [f"losses by the weights in {name}", head, *lines, *more]


def _line(row: Row, figures: str = "") -> str:
    step = "" if row.step is None else str(row.step)
    label = f"[{row.label}] " if row.label else ""
    return f"{row.row:9} {step:>7} {row.length:6}{figures}  {label}{row.text}"
