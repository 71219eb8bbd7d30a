"""Report which rows a step trains on, and which steps train on a row.

This works for any run, even without a log: the order of rows in an epoch is a
permutation, and each element of the permutation and of its inverse can be computed
separately. Steps are numbered from 1, as in the log and in the history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.nn.utils import get_total_norm

from flatout.engine.answers.plain import Plain
from flatout.engine.checkpoints.checkpoint_folder import FINISHED, RESULT, step_folders
from flatout.engine.checkpoints.resume import differing, find_checkpoint
from flatout.engine.checkpoints.shards import load_whole
from flatout.engine.machine.runtime import Runtime, set_up
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import SettingsError
from flatout.engine.train.keeping.snapshots import MODEL
from flatout.engine.train.recording.metrics_file import read_points
from flatout.engine.train.setup.assemble import seeded_model
from flatout.engine.train.setup.identity import SKIPPED, result_identity
from flatout.engine.train.setup.job import TrainJob, cut, decoder, printable

KEYS = {"token rows", "train rows", "runtime.seed", "train.global_batch_size", SKIPPED}
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
    epochs = range(job.batches.epoch(job.total_steps - 1) + 1)
    steps = [int(job.batches.steps_of(np.array([row]), n)[0]) + 1 for n in epochs]
    return [step for step in steps if step <= job.total_steps]


def largest_rise(metrics_file: Path) -> tuple[range, str]:
    """Find the two successive points in `metrics_file` between which the training loss
    rises most. Return the steps after the first point, up to and including the second
    one, and a description. Raises SettingsError if the loss never rises."""
    found = [(p["step"], p["metrics"]) for p in read_points(metrics_file)]
    losses = {step: m["train_loss"] for step, m in found if "train_loss" in m}
    steps = sorted(losses)
    rises = np.nan_to_num(np.diff([losses[step] for step in steps]), nan=np.inf)
    if not (rises > 0).any():
        raise SettingsError(
            f"--spike: {metrics_file} has no loss that rises between two points; train "
            "first, or set train.log_every to fewer steps"
        )
    here, step = steps[rises.argmax() :][:2]
    told = f"loss {losses[here]:.4f} at step {here}, {losses[step]:.4f} at step {step}"
    return range(here + 1, step + 1), told


def row_lines(
    job: TrainJob, *, step: int | None, row: int | None, replays: bool, most: int
) -> list[str]:
    """Return lines that describe the rows of `step`, or `row`. If both are None, the
    rows at the largest rise in the loss are described. At most `most` rows are shown,
    with recomputed losses and gradient norms if `replays` is true. Raises SettingsError
    if there is nothing to show, or if losses of the last run are needed but it used
    different rows."""
    notes = []
    if found := _other_rows(job):
        if replays or (step is None and row is None):
            raise SettingsError(
                f"the run in {job.work_folder} had other rows in its steps (then -> "
                f"now): {found}. Set these back, and make the same rows again (kedro "
                "run --pipelines=split,tokenize)"
            )
        notes = [f"These are not the rows of the last run: {found}"]
    head, table, at = _select_rows(job, step, row)
    table["length"] = job.train.lengths(table["row"].to_numpy())
    if replays:
        runtime, numbers = set_up(job.settings.runtime), table["row"].tolist()
        name, figures = replay(job, runtime, numbers, at)
        table[["loss", "gradient"]] = figures
        table = table.sort_values("loss", ascending=False, kind="stable")
        notes.append(f"losses by the weights in {name}")
    shown, decode = table.head(most), decoder(job)
    lines = shown.to_string(index=False, float_format="{:.4g}".format).splitlines()
    texts = ["text", *(_text(job, number, decode) for number in shown["row"])]
    lines = [f"{line}  {text}" for line, text in zip(lines, texts, strict=True)]
    more = [f"and {len(table) - most} more (--most)"] if len(table) > most else []
    return [head, *notes, *lines, *more]


def _select_rows(
    job: TrainJob, step: int | None, row: int | None
) -> tuple[str, pd.DataFrame, int]:
    """Return a headline, a table of the rows with their steps, and the step whose
    weights are used for a replay."""
    if row is not None:
        steps = steps_of_row(job, row)
        shown = "step " if len(steps) == 1 else "steps "
        shown += ", ".join(map(str, steps))
        if row in job.batches.skipped:
            shown = "no step: train.skip_rows leaves it out"
        elif not steps:
            shown = f"no step: the run ends at step {job.total_steps}, before it"
        head = f"row {row} is trained in {shown}"
        return head, pd.DataFrame({"row": [row]}), max(steps, default=0)
    if step is None:
        chosen, head = largest_rise(job.metrics_file)
    else:
        chosen, head = range(step, step + 1), f"step {step}"
    rows = rows_of_steps(job, chosen)
    table = pd.DataFrame(rows, columns=["row", "step"])
    return f"{head}: {len(rows)} rows", table, chosen[0] - 1


def _other_rows(job: TrainJob) -> str:
    """Return the settings of the last run in the job's folder that gave its steps other
    rows, or an empty text."""
    results = [job.work_folder / name for name in (RESULT, FINISHED)]
    if path := next(filter(Path.is_file, results), None):
        before = {SKIPPED: [], **json.loads(path.read_text("utf-8"))["identity"]}
    else:  # a checkpoint does not record which rows were skipped
        checkpoint = find_checkpoint("auto", job.work_folder)
        before = checkpoint.manifest.identity if checkpoint else {}
    now = {SKIPPED: [], **result_identity(job)}
    names = before.keys() & KEYS
    return "; ".join(differing(*({n: own[n] for n in names} for own in (before, now))))


def _text(job: TrainJob, row: int, decode: Callable[..., str]) -> str:
    """Return the start of a row's text, preceded by its label if it has one."""
    text = cut(printable(job.train.readable(row, decode)), SHOWN)
    if not job.train.has_labels or job.train.has_token_labels:
        return text
    label, names = job.train.labels_of(np.array([row]))[0], np.array(job.label_names)
    shown = [f"{label.ravel()[0]:g}"]  # a ranked row also has the number of its query
    if len(names):
        shown = np.atleast_1d(names[label > 0 if label.ndim else label]).tolist()
    return f"[{' '.join(shown)}] {text}"


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
    kept = job.work_folder
    paths = [*kept.glob("best-*"), *step_folders(kept), *kept.glob("last")]
    saved = {float(path.name.partition("-")[2] or "inf"): path for path in paths}
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
