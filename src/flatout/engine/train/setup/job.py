"""The input of a training run, and checks of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.parameters.faults import first_line
from flatout.engine.rows import max_length
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import SplitRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import Task, check_options, loss_options, make_task

ROW_COLUMN = "row"
"""The column of row numbers in a Parquet file for `train.skip_rows`."""


@dataclass(frozen=True)
class TrainJob:
    """The input of a training run. It can be pickled and sent to other processes."""

    settings: Settings
    train: SplitRows
    validation: SplitRows
    test: SplitRows
    vocabulary: Vocabulary | None
    """The properties of the tokenizer, or None if rows do not consist of tokens."""
    label_names: tuple[str, ...]
    work_folder: Path
    """The folder for checkpoints and intermediate models."""
    metrics_file: Path
    """The file for live metrics, in JSON Lines."""
    data_key: str = ""
    """The content key of the token rows."""
    tokenizer_file: str | None = None
    """The tokenizer.json that decodes rows for messages, or None to show token ids."""

    def in_folder(self, folder: Path) -> TrainJob:
        """Return a copy of the job that uses the work folder `folder` and no mirror."""
        unmirrored = self.changed({"train.checkpoint.mirror": None})
        return replace(unmirrored, work_folder=folder)

    def changed(self, values: Mapping[str, Any]) -> TrainJob:
        """Return a copy of the job with new settings, by dotted name."""
        return replace(self, settings=self.settings.changed(values))

    @cached_property
    def task(self) -> Task:
        """The task to train. Raises SettingsError or TaskError if it is invalid."""
        settings = self.settings
        names, seed = self.label_names, settings.runtime.seed
        task = make_task(settings.model, names, self.vocabulary, seed)
        counts = self.train.facts.label_counts
        task.loss_options = loss_options(settings.train, names, counts)
        return task

    @cached_property
    def batches(self) -> GlobalBatches:
        """The global batches of the run, without skipped rows. Raises SettingsError if
        `train.skip_rows` is invalid."""
        train, seed = self.settings.train, self.settings.runtime.seed
        batches = GlobalBatches(len(self.train), train.global_batch_size, seed)
        if not train.skip_rows:
            return batches
        skipped = skipped_rows(train.skip_rows, len(self.train))
        total = batches.total_steps(train.epochs, train.max_steps)
        check_skipped(skipped, batches, total)
        return replace(batches, skipped=tuple(skipped.tolist()))

    @property
    def max_length(self) -> int:
        return max_length(self.settings)

    @property
    def splits(self) -> dict[str, SplitRows]:
        names = ("train", "validation", "test")
        return {name: getattr(self, name) for name in names}

    @property
    def total_steps(self) -> int:
        train = self.settings.train
        return self.batches.total_steps(train.epochs, train.max_steps)


def skipped_rows(given: Sequence[int] | str, num_rows: int) -> Ints:
    """Return the row numbers in `train.skip_rows`, a list or a file, as a sorted array
    (N,). Raises SettingsError if the file cannot be read or a row does not exist."""
    found = _read(Path(given)) if isinstance(given, str) else given
    rows = np.unique(np.array(found, dtype=np.int64))
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise SettingsError(
            f"train.skip_rows: there is no row {outside[0]}; the training rows are "
            f"numbered 0 to {num_rows - 1}. Have they been rebuilt since?"
        )
    return rows


def _read(path: Path) -> Sequence[int]:
    try:
        if path.suffix == ".parquet":
            found = pq.read_table(path, columns=[ROW_COLUMN])[ROW_COLUMN].to_pylist()
        else:
            found = path.read_text(encoding="utf-8").split()
        return [int(number) for number in found]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"train.skip_rows: {path} cannot be read ({first_line(error)}): give a "
            f"text file with one row number per line, or a Parquet file with a column "
            f"{ROW_COLUMN}"
        ) from error


def check_skipped(skipped: Ints, batches: GlobalBatches, total_steps: int) -> None:
    """Raise SettingsError if skipping the rows `skipped` (N,) leaves a step empty."""
    least = batches.num_rows % batches.batch_size or batches.batch_size
    for epoch in range(math.ceil(total_steps / batches.steps_per_epoch)):
        steps, counts = np.unique(batches.steps_of(skipped, epoch), return_counts=True)
        for step in steps[counts >= least].tolist():
            if step < total_steps and counts[steps == step] == len(batches.rows(step)):
                raise SettingsError(
                    f"train.skip_rows leaves no row in step {step + 1}: skip fewer, or "
                    "remove them from the raw data and repeat kedro run"
                )


def check_rows(job: TrainJob) -> None:
    """Raise SettingsError or ModelError if the rows of a split do not fit the task, the
    tokenizer or the label names."""
    check_options(job.settings)
    task, classes = job.task, len(job.label_names)
    for name, rows in job.splits.items():
        if task.label_type is not None and not rows.has_labels:
            raise SettingsError(
                f"model.task: {job.settings.model.task} needs a column labels in "
                f"{name}_tokens: set split.label_column, or a task without labels"
            )
        largest = rows.facts.largest_id
        if job.vocabulary and largest >= job.vocabulary.size:
            raise ModelError(
                f"{name}_tokens has token {largest}, the tokenizer has "
                f"{job.vocabulary.size}: they do not belong together; run the tokenize "
                "pipeline again"
            )
        labels = rows.facts.labels
        if classes and labels and (labels[0] < 0 or labels[-1] >= classes):
            raise ModelError(
                f"{name}_tokens has labels from {labels[0]} to {labels[-1]}, there are "
                f"{classes} label names (0 to {classes - 1}): run the tokenize "
                "pipeline again"
            )
    facts = job.train.facts
    if job.task.texts.completions and facts.num_unlabelled == facts.num_rows > 0:
        raise SettingsError(
            "no row of train_tokens has a target: every prompt fills the whole row. "
            "Raise tokenize.max_length"
        )


def without_targets(job: TrainJob) -> list[str]:
    """Return a list with a warning if there are rows without a target, else an empty
    list. The prompts of such rows leave no room for a completion."""
    facts = job.train.facts
    if not (job.task.texts.completions and facts.num_unlabelled):
        return []
    rows = ", ".join(map(str, facts.unlabelled))
    more = ", ..." if facts.num_unlabelled > len(facts.unlabelled) else ""
    return [
        f"{facts.num_unlabelled:,} of {facts.num_rows:,} training rows have no target, "
        f"because the prompt fills the whole row: rows {rows}{more} of train_tokens. "
        "The model does not learn from them: raise tokenize.max_length"
    ]


def as_numbers(tokens: Ints) -> str:
    """Return token IDs as text, separated by spaces."""
    return " ".join(map(str, tokens.tolist()))


def decoder(job: TrainJob) -> Callable[[Ints], str]:
    """Return a function that decodes tokens to text. If there is no matching tokenizer,
    the function returns token ids as text."""
    if job.tokenizer_file is None or job.vocabulary is None:
        return as_numbers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(job.tokenizer_file)
    if tokenizer.get_vocab_size() != job.vocabulary.size:
        return as_numbers
    return lambda tokens: str(tokenizer.decode(tokens.tolist()))


def cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def printable(text: str) -> str:
    """Return `text` as one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
