"""Predictions of a saved model for a labelled split, computed in one pass.

The table of predictions contains one line per row. For language models, the table is
empty and only metrics are computed, because they make no predictions for whole rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.machine.environment import Ranks
from flatout.engine.models.building import ModelError
from flatout.engine.models.trained_rows import TrainedRows
from flatout.engine.parameters import Settings
from flatout.engine.parameters.faults import some_of
from flatout.engine.predict.checks import (
    check_tokens,
    label_names_of,
    task_of,
    vocabulary_of,
    with_calibration,
)
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.rows import SplitRows, rows_from_dataset
from flatout.engine.tasks import Calibrated, Task
from flatout.engine.tasks._shared.reliability import calibration_figures
from flatout.engine.tokenizing.token_keys import token_key
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.train.evaluate import Sums

logger = logging.getLogger(__name__)

MOST_SEEN = 0.01
"""If more than this fraction of the rows equal training rows, the model is considered
to have been trained on a different split."""
SEPARATE = frozenset({"label", "score", "value"})
"""Task outputs that are not copied to the table, because other columns contain them."""


@dataclass
class SplitPredictions:
    """Predictions and metrics of a model for a split, computed on first access."""

    model: Any
    tokenizer: TokenizerFile | None
    """The tokenizer of the model, or None if rows are not tokens."""
    tokens: Any
    """The `datasets.Dataset` of the split."""
    train: Any
    """The `datasets.Dataset` of the train split."""
    label_names: Sequence[str]
    settings: Settings

    @cached_property
    def trained(self) -> TrainedRows | None:
        """The record of the training rows in the model's folder, or None."""
        return TrainedRows.read(self.model.config.name_or_path)

    @property
    def seed(self) -> int:
        """The training seed of the model, which determines the masked tokens."""
        return self.trained.seed if self.trained else self.settings.runtime.seed

    @cached_property
    def opened(self) -> tuple[Predictor, SplitRows, int | None]:
        """The predictor, the rows of the split, and how many of these the model was
        trained on (None if unknown). Raises ModelError if model and rows do not fit
        together."""
        settings, tokenizer = self.settings, self.tokenizer
        vocabulary = vocabulary_of(tokenizer)
        task = task_of(self.model, settings.model, vocabulary, self.seed)
        _check_names(self.model.config, self.label_names)
        check_tokens(self.tokens, tokenizer)
        predictor = Predictor(self.model, tokenizer, settings, task)
        rows = rows_from_dataset(self.tokens)
        _check_length(rows, predictor.max_length)
        return predictor, rows, self._trained_on(rows, task)

    @cached_property
    def _found(self) -> tuple[Any, dict[str, Any]]:
        predictor, rows, trained_on = self.opened
        task = with_calibration(predictor.task, self.model)
        named = {"task": task.settings.task, "trained_on": trained_on}
        answers = task.head_kind.one_a_row and task.answer_fields()
        if answers and not task.whole_batch:
            table, figures = _answered(predictor, rows)
            return table, named | figures
        found = predictor.evaluate(rows)
        return _table({}, {}, task), named | {"loss": found.loss, **found.metrics}

    def _trained_on(self, rows: SplitRows, task: Task) -> int | None:
        """Return how many of `rows` the model was trained on, or None if this is
        unknown. Raises ModelError if the model was trained on a different split of the
        texts."""
        split, trained = self.settings.evaluate.split, self.trained
        if trained is None:
            return None
        seen, same = trained.count(rows), trained.key == token_key(self.train)
        if split == "train" or same:
            return seen
        # Sessions and samples naturally repeat, but `split` removes duplicate texts.
        if self.tokenizer is None or task.texts.whole_words:
            if seen:
                logger.warning("%s", _seen(seen, len(rows), split))
            return seen
        if seen is None or seen > MOST_SEEN * len(rows):
            raise ModelError(_seen(seen, len(rows), split))
        return seen

    def table(self) -> Any:
        """Return an Arrow table with the columns `row`, `label`, `prediction`, `score`,
        `loss` and `wrong`, and the task's other outputs."""
        return self._found[0]

    def value(self) -> dict[str, Any]:
        """Return a dict with the loss, the metrics, the split, the number of rows, the
        model, the task, and the number of rows that the model was trained on."""
        split, config = self.settings.evaluate.split, self.model.config
        facts = {"split": split, "rows": len(self.tokens), "model": config.name_or_path}
        return {**facts, **self._found[1]}


def _seen(seen: int | None, rows: int, split: str) -> str:
    count = "an unknown number" if seen is None else f"{seen:,}"
    return (
        f"{count} of {rows:,} {split} rows were trained on: the model is of another "
        "split than these rows, and its figures would be too good. Train on this split "
        "(kedro run), or split as the training did (its data and split.* parameters: "
        "kedro run --pipelines=split,tokenize), then evaluate"
    )


def _check_names(config: Any, label_names: Sequence[str]) -> None:
    """Raise ModelError if the labels of the tokens differ from the model's classes."""
    known = label_names_of(config) if label_names else []
    if known != list(label_names):
        raise ModelError(
            f"the model has the labels {some_of(known)}, the tokens have "
            f"{some_of(label_names)}: evaluate it on rows with the model's labels"
        )


def _check_length(rows: SplitRows, most: int) -> None:
    if rows.facts.longest > most:
        raise ModelError(
            f"the longest row has {rows.facts.longest} tokens, the model accepts at "
            f"most {most}: lower tokenize.max_length, and run kedro run "
            "--pipelines=tokenize"
        )


def _answered(predictor: Predictor, rows: Any) -> tuple[Any, dict[str, Any]]:
    task, logits = predictor.task, predictor.logits(rows)
    labels = rows.labels_of(np.arange(len(rows))).astype(task.label_dtype)
    further = {}
    if isinstance(task, Calibrated):
        temperature = task.calibration.temperature
        further = calibration_figures(logits, labels, temperature, task.label_names)
        if task.settings.label_threshold == "auto":
            further["label_thresholds"] = task.calibration.thresholds
        logits = logits / np.float32(temperature)
    tensors = torch.from_numpy(logits), torch.from_numpy(labels)
    sums = Sums(task, torch.device("cpu"), predictor.own_metrics)
    sums.add(*tensors)
    found = sums.read(replace(predictor.runtime, ranks=Ranks()))
    figures = {"loss": found.loss, **found.metrics, **further}
    return _table(task.judge(*tensors), task.answers(logits), task), figures


def _table(judged: Mapping[str, Any], answers: Mapping[str, Any], task: Task) -> Any:
    labels = judged.get("label", [])
    is_number = len(labels) and not isinstance(labels[0], str)
    kind = pa.float64() if is_number else pa.string()
    fields = {"label": kind, "prediction": kind, "score": pa.float32()}
    fields |= {"loss": pa.float32(), "wrong": pa.bool_()}
    columns = {"row": pa.array(np.arange(len(labels)))}
    for name, type_ in fields.items():
        values = judged.get(name, [None] * len(labels))
        values = values.tolist() if isinstance(values, torch.Tensor) else values
        columns[name] = pa.array(values, type_)
    for field in task.answer_fields() if judged else ():
        if field.name not in SEPARATE:
            columns[field.name] = pa.array(answers[field.name], field.type)
    return pa.table(columns)
