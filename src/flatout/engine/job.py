"""What a training run is given, and whether its rows can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.engine.building import ModelError, Vocabulary
from flatout.engine.settings import CLASSIFIES, Settings, SettingsError
from flatout.engine.tokens import TokenRows


@dataclass(frozen=True)
class TrainJob:
    """Everything a training run needs; can be sent to another process."""

    settings: Settings
    train: TokenRows
    validation: TokenRows
    test: TokenRows
    vocabulary: Vocabulary
    label_names: tuple[str, ...]
    work_folder: Path
    """Checkpoints and the models on the way."""
    metrics_file: Path
    """Live points, a JSON line each."""
    data_key: str = ""
    """Content key of the tokens."""


def check_rows(job: TrainJob) -> None:
    """Rows that fit the task and the label names. Raises SettingsError, ModelError."""
    task = job.settings.model.task
    for name, rows in _splits(job):
        if task in CLASSIFIES and rows.labels is None:
            raise SettingsError(
                f"model.task: {task} needs a column labels in {name}_tokens: set "
                "split.label_column, or choose causal-lm or masked-lm"
            )
        largest = rows.largest_token_id()
        if largest >= job.vocabulary.size:
            raise ModelError(
                f"{name}_tokens holds token {largest}, the tokenizer has "
                f"{job.vocabulary.size}: they do not belong together; run the tokenize "
                "pipeline again"
            )
    if task == "sequence-classification":
        _check_labels(job)


def _check_labels(job: TrainJob) -> None:
    classes = len(job.label_names)
    for name, rows in _splits(job):
        labels = rows.labels
        if labels is None or not len(labels):
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ModelError(
                f"{name}_tokens has labels from {low} to {high}, there are {classes} "
                f"label names (0 to {classes - 1}): run the tokenize pipeline again"
            )


def _splits(job: TrainJob) -> Sequence[tuple[str, TokenRows]]:
    return [
        ("train", job.train),
        ("validation", job.validation),
        ("test", job.test),
    ]
