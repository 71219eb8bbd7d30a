"""What a saved model says of a split whose labels are known: one pass, kept by key.

A line for each row, and the task's own figures. Language models, which answer no row,
give figures alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.checkpoints.checkpoint_folder import file_hash
from flatout.engine.files.content_key import ContentKey
from flatout.engine.machine.environment import Ranks
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import Settings
from flatout.engine.predict.checks import check_tokens, evaluated_task, label_names_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.opening import rows_from_dataset
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Judged, Task
from flatout.engine.tokenizing.token_keys import token_key
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.train.evaluate import Sums

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Raise it when the same input would give other predictions."""
ROWS_AT_ONCE = 4_096
"""Judged together: bounds the memory of Python's objects."""
TOLD = frozenset({"label", "score", "value"})
"""Answers of a task that stand in columns of their own here."""


@dataclass
class SplitPredictions:
    """A model's answers to all rows of a split; computed when first asked for."""

    model: Any
    tokenizer: TokenizerFile | None
    """None: the rows are no tokens."""
    tokens: Any
    """`datasets.Dataset`."""
    label_names: Sequence[str]
    settings: Settings

    @cached_property
    def _found(self) -> tuple[Any, dict[str, Any]]:
        """Table of predictions, and figures."""
        task = evaluated_task(self.model, self.tokenizer, self.settings.model)
        _check_names(self.model.config, self.label_names)
        check_tokens(self.tokens, self.tokenizer)
        predictor = Predictor(self.model, self.tokenizer, self.settings, task)
        rows = rows_from_dataset(self.tokens)
        _check_length(rows, predictor.max_length)
        named = {"task": task.settings.task}
        if task.one_a_row and task.answer_fields():
            table, figures = _answered(predictor, rows)
            return table, named | figures
        found = predictor.evaluate(rows)
        return _table([], {}, task), named | {"loss": found.loss, **found.metrics}

    def table(self) -> Any:
        """row, label, prediction, score, loss, wrong; then the task's own answers."""
        return self._found[0]

    def figures(self) -> dict[str, Any]:
        """Loss and the task's metrics, and where they come from: split, rows, model,
        task."""
        split, config = self.settings.evaluate.split, self.model.config
        facts = {"split": split, "rows": len(self.tokens), "model": config.name_or_path}
        return {**facts, **self._found[1]}


@dataclass(frozen=True)
class PredictionsRecipe:
    """How to make the table."""

    key: ContentKey
    found: SplitPredictions

    def table(self) -> Any:
        return self.found.table()


@dataclass(frozen=True)
class FiguresRecipe:
    """How to make the figures."""

    key: ContentKey
    found: SplitPredictions

    def value(self) -> dict[str, Any]:
        return self.found.figures()


def plan_predictions(found: SplitPredictions) -> dict[str, Any]:
    """Recipes by what they make: predictions and figures, kept while model, tokens and
    precision are the same."""
    settings, config = found.settings, found.model.config
    key = ContentKey(
        {
            "format": FORMAT_VERSION,
            "model": _files_of(config),
            "tokens": token_key(found.tokens),
            "label_names": list(found.label_names),
            "evaluate.split": settings.evaluate.split,
            "runtime.precision": settings.runtime.precision,
            "model.label_threshold": settings.model.label_threshold,
            "model.mask_probability": settings.model.mask_probability,
        }
    )
    return {
        "predictions": PredictionsRecipe(key, found),
        "figures": FiguresRecipe(key, found),
    }


def _files_of(config: Any) -> dict[str, str]:
    """Hashes of a model's files; of one that is in no folder here its name and
    commit."""
    folder = Path(config.name_or_path or "")
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    if not config.name_or_path or not files:
        commit = getattr(config, "_commit_hash", None)
        return {str(config.name_or_path): str(commit)}
    return {path.name: file_hash(path) for path in files}


def _check_names(config: Any, label_names: Sequence[str]) -> None:
    """Raises ModelError where the numbers in the tokens mean other classes."""
    known = label_names_of(config) if label_names else []
    if known != list(label_names):
        raise ModelError(
            f"the model tells {_shown(known)} apart, the tokens have "
            f"{_shown(label_names)}: evaluate it on rows of its own labels"
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def _check_length(rows: SplitRows, most: int) -> None:
    if rows.facts.longest > most:
        raise ModelError(
            f"the tokens have rows of {rows.facts.longest}, the model takes at most "
            f"{most}: lower tokenize.max_length and run kedro run --pipelines=tokenize"
        )


def _answered(predictor: Predictor, rows: Any) -> tuple[Any, dict[str, Any]]:
    task, logits = predictor.task, predictor.logits(rows)
    labels = rows.labels_of(np.arange(len(rows))).astype(task.label_dtype)
    tensors = torch.from_numpy(logits), torch.from_numpy(labels)
    sums = Sums(task, torch.device("cpu"))
    sums.add(*tensors)
    found = sums.read(replace(predictor.runtime, ranks=Ranks()))
    judged = list(_judged(task, *tensors))
    figures = {"loss": found.loss, **found.metrics}
    return _table(judged, task.answers(logits), task), figures


def _judged(task: Task, logits: Any, labels: Any) -> Iterator[Judged]:
    for start in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        yield from task.judge(logits[part], labels[part], str)


def _table(judged: Sequence[Judged], answers: Mapping[str, Any], task: Task) -> Any:
    kind = pa.float64() if judged and _is_number(judged[0].label) else pa.string()
    fields = {"label": kind, "prediction": kind, "score": pa.float32()}
    fields |= {"loss": pa.float32(), "wrong": pa.bool_()}
    own = [field for field in task.answer_fields() if field.name not in TOLD]
    columns = {
        name: pa.array([getattr(one, name) for one in judged], type_)
        for name, type_ in fields.items()
    }
    columns |= {f.name: pa.array(answers[f.name], f.type) for f in own if judged}
    return pa.table({"row": pa.array(np.arange(len(judged))), **columns})


def _is_number(value: Any) -> bool:
    return isinstance(value, float)
