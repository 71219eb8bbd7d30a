"""Input of a training run, and checks of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.batches.skipped import check_skipped, skipped_rows
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import SplitRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import Task, check_options, loss_options, make_task


@dataclass(frozen=True)
class TrainJob:
    """Everything a training run needs; can be sent to another process."""

    settings: Settings
    train: SplitRows
    validation: SplitRows
    test: SplitRows
    vocabulary: Vocabulary | None
    """None for rows without tokens."""
    label_names: tuple[str, ...]
    work_folder: Path
    """Folder of checkpoints and intermediate models."""
    metrics_file: Path
    """File of live points, one JSON line each."""
    data_key: str = ""
    """Content key of the tokens."""
    tokenizer_file: str | None = None
    """A tokenizer.json for readable rows; None: rows are shown as token numbers."""

    def in_folder(self, folder: Path) -> TrainJob:
        """Return the job in another work folder, without a mirror."""
        unmirrored = self.changed({"train.checkpoint.mirror": None})
        return replace(unmirrored, work_folder=folder)

    def changed(self, values: Mapping[str, Any]) -> TrainJob:
        """Return the job with other settings, by path (`train.max_steps`)."""
        return replace(self, settings=self.settings.changed(values))

    @cached_property
    def task(self) -> Task:
        """The task of the model. Raises SettingsError, TaskError."""
        settings = self.settings
        names, seed = self.label_names, settings.runtime.seed
        task = make_task(settings.model, names, self.vocabulary, seed)
        counts = self.train.facts.label_counts
        task.loss_options = loss_options(settings.train, names, counts)
        return task

    @cached_property
    def batches(self) -> GlobalBatches:
        """The rows of each step, without those skipped. Raises SettingsError."""
        train, seed = self.settings.train, self.settings.runtime.seed
        batches = GlobalBatches(len(self.train), train.global_batch_size, seed)
        if not train.skip_rows:
            return batches
        skipped = skipped_rows(train.skip_rows, len(self.train))
        total = batches.total_steps(train.epochs, train.max_steps)
        check_skipped(skipped, batches, total)
        return replace(batches, skipped=tuple(skipped.tolist()))

    @property
    def splits(self) -> dict[str, SplitRows]:
        names = ("train", "validation", "test")
        return {name: getattr(self, name) for name in names}

    @property
    def total_steps(self) -> int:
        train = self.settings.train
        return self.batches.total_steps(train.epochs, train.max_steps)


def check_rows(job: TrainJob) -> None:
    """Check that rows fit task and label names. Raises SettingsError, ModelError."""
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
    """Warn about rows that have only a prompt and no completion, from which the model
    cannot learn."""
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
    """Return token numbers as text."""
    return " ".join(map(str, tokens.tolist()))


def decoder(job: TrainJob) -> Callable[[Ints], str]:
    """Return a function from tokens to text; to numbers without the tokenizer."""
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
    """Return one line, without characters that control a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
