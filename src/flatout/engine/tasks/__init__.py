"""Training tasks, each in its own module.

`model.task` is the name of a module in this package (`causal-lm` is causal_lm.py) or
the dotted path of a custom class that derives from `Task`. A task's module is imported
only when the task is used. The `split` pipeline uses tasks without importing torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import FunctionType
from typing import Any

import pyarrow as pa

from flatout.engine.data.columns import Columns
from flatout.engine.parameters import (
    ModelSettings,
    Settings,
    SettingsError,
    SplitSettings,
    near_or_all,
    refusal,
)
from flatout.engine.parameters.own_parts import own_part
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks._labels import (
    Calibrated as Calibrated,
    calibration_faults as calibration_faults,
)
from flatout.engine.tasks._options import (
    figures_of as figures_of,
    higher_is_better as higher_is_better,
    loss_options as loss_options,
    option_faults,
)
from flatout.engine.tasks._task import (
    IGNORED as IGNORED,
    HeadKind as HeadKind,
    LossOptions as LossOptions,
    Metrics as Metrics,
    RankedRows as RankedRows,
    Targets as Targets,
    Task as Task,
    TaskError as TaskError,
    Texts as Texts,
    has_custom_head as has_custom_head,
    ignored_label as ignored_label,
    without_options as without_options,
)

PAIRED = (
    ("anchor", "positive", "embedding", "pairs"),
    ("query", "passage", "reranking", "ranking"),
)
"""Pairs of text columns, with the task that needs each pair and its form of rows."""
MOVED = {
    "head": "head_kind",
    "row_form": "texts = Texts(form=...)",
    "learns_completions": "texts = Texts(completions=...)",
    "causal": "texts = Texts(causal=...)",
    "predicts_neighbours": "texts = Texts(predicts_neighbours=...)",
    "joins_texts": "texts = Texts(joined=...)",
    "whole_words": "texts = Texts(whole_words=...)",
    "answers_rows": "row_answers, from target_outputs,",
}
"""The new names of task attributes that were renamed after version 0.1."""


def task_names() -> list[str]:
    """Return the names of the built-in tasks."""
    modules = (module.name for module in iter_modules(__path__))
    return sorted(n.replace("_", "-") for n in modules if not n.startswith("_"))


def task_class(name: str) -> type[Task]:
    """Return the class of the task `name`. Raises SettingsError if there is none."""
    if "." in name:
        return _own_class(name)
    if name not in task_names():
        near = near_or_all(name, task_names(), "")
        raise SettingsError(f"model.task: there is no task {name!r}; {near}")
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    found = (kind for kind in vars(module).values() if isinstance(kind, type))
    return next(k for k in found if k.__module__ == module.__name__)


def names_classes(name: str) -> bool:
    """Return whether the task `name` labels each row with the name of one class."""
    return bool(task_class(name).label_type == pa.string())


def check_options(settings: Settings) -> None:
    """Raise SettingsError if the settings use an option that the task cannot use."""
    if faults := option_faults(settings, task_class(settings.model.task)):
        raise refusal(faults)


def columns_of(split: SplitSettings, task: str) -> Columns:
    """Return the column roles for the task, or raise RawTextsError or SettingsError."""
    kind = task_class(task)
    own = {"completion": split.completion_column, "messages": split.messages_column}
    form = next((form for form, column in own.items() if column), kind.texts.form)
    if form in own and not kind.texts.completions:
        raise SettingsError(
            f"split.{form}_column is for model.task: causal-lm, not {task}: set it to "
            "null, or the task"
        )
    for first, second, wanted, its_form in PAIRED:
        if getattr(split, f"{first}_column") and form != its_form:
            raise SettingsError(
                f"split.{first}_column is for model.task: {wanted}, not {task}: set it "
                f"and split.{second}_column to null, or the task"
            )
    return Columns.of(split, kind.label_type, task, form)


def make_task(
    settings: ModelSettings,
    label_names: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
    seed: int = 0,
) -> Task:
    """Create the task set in `settings.task`. Raises SettingsError if there is no such
    task, and TaskError if the task does not fit the vocabulary."""
    return task_class(settings.task)(settings, tuple(label_names), vocabulary, seed)


def task_of_model(model: Any) -> str | None:
    """Return the name of the task for which a saved model was trained, or None if it is
    unknown. The name is read from the model's config or inferred from its class."""
    config, kind = model.config, type(model).__name__
    if named := getattr(config, "flatout_task", None):
        return str(named)
    if kind.endswith("ForTokenClassification"):
        return "token-classification"
    several = config.problem_type == "multi_label_classification"
    if kind.endswith("ForImageClassification"):
        is_one_of_many = config.num_labels > 1 and not several
        return "image-classification" if is_one_of_many else None
    if not kind.endswith("ForSequenceClassification"):
        return None
    if several:
        return "multi-label-classification"
    return "sequence-classification" if config.num_labels > 1 else "regression"


def _own_class(path: str) -> type[Task]:
    found = own_part(path, "model.task")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise SettingsError(f"model.task: {path} does not derive from {Task.__name__}")
    for name, now in MOVED.items():
        if hasattr(found, name) and not callable(getattr(found, name)):
            raise SettingsError(f"model.task: {path}.{name} is {now} now")
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise SettingsError(f"model.task: {path} has no {missing}; add it to the class")
    for name, base in vars(Task).items():
        if fault := _override_fault(inspect.getattr_static(found, name), base):
            raise SettingsError(f"model.task: {path}.{name} {fault}")
    return found


def _override_fault(own: Any, base: Any) -> str:
    """Return why the member `own` of a custom task cannot override `base`, if it is a
    method: methods such as `judge` are called only after the training."""
    if own is base or not isinstance(own, (FunctionType, staticmethod)):
        return ""
    if not callable(base):
        return f"is a method: set it to a value, as Task does ({base!r})"
    found = [*inspect.signature(base).parameters.values()][1:]
    named = {p.name: p for p in found if p.kind is p.KEYWORD_ONLY}
    others = [p for p in found if p.name not in named]
    try:
        inspect.signature(own.__get__(Task, Task)).bind(*others, **named)
    except TypeError as error:
        return f"cannot be called with ({', '.join(p.name for p in found)}): {error}"
    return ""
