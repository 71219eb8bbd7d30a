"""Check that a task supports the configured training options. No rows are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from flatout.engine.parameters import (
    ModelSettings,
    Settings,
    SettingsError,
    TrainSettings,
    near_or_all,
)
from flatout.engine.parameters.faults import some_of
from flatout.engine.parameters.own_parts import own_part_faults
from flatout.engine.tasks._labels import calibration_faults
from flatout.engine.tasks._task import HeadKind, LossOptions, Task


def option_faults(settings: Settings, task: type[Task]) -> list[str]:
    """Return one message for each parameter that `task` does not support."""
    given = [o.name for o in fields(LossOptions) if getattr(settings.train, o.name)]
    valid = ", ".join(sorted(task.takes_options)) or "none"
    faults = [
        f"train.{name}: {settings.model.task} does not use it (valid: {valid})"
        for name in given
        if name not in task.takes_options
    ]
    checks = (_metric_fault, _predictions_fault, _batch_fault)
    found = (check(settings, task) for check in checks)
    faults += [*filter(None, found), *calibration_faults(settings, task)]
    return [*faults, *own_part_faults(settings.train)]


def figures_of(model: ModelSettings, task: type[Task]) -> dict[str, bool]:
    """Return the names of a task's metrics, including those of truncated vectors
    (`model.matryoshka`), mapped to whether higher values are better."""
    sizes = model.matryoshka if task.texts.form == "pairs" else []
    own = {name: higher for name, higher in task.figures.items() if name != "loss"}
    found = dict(task.figures)
    for size in sizes:
        found |= {f"{name}_dim_{size}": higher for name, higher in own.items()}
    return found


def higher_is_better(settings: Settings, task: type[Task], figure: str) -> bool:
    """Return whether higher values of the built-in or custom `figure` are better."""
    if figure in (known := figures_of(settings.model, task)):
        return known[figure]
    given = settings.train.greater_is_better
    return not figure.endswith("loss") if given is None else given


def loss_options(
    train: TrainSettings, label_names: Sequence[str], label_counts: Mapping[str, int]
) -> LossOptions:
    """Return the options of the training loss. `label_counts` contains the number of
    train rows per class, with class numbers as strings. Raises SettingsError if the
    class weights do not match the classes."""
    weights = _class_weights(train, label_names, label_counts)
    if weights is not None and not any(weights):
        raise SettingsError(
            "train.class_weights: all weights are 0, so the model would learn nothing: "
            "give at least one class a weight above 0"
        )
    return LossOptions(weights, train.label_smoothing, train.focal_gamma)


def _class_weights(
    train: TrainSettings, names: Sequence[str], counts: Mapping[str, int]
) -> tuple[float, ...] | None:
    given = train.class_weights
    if given is None:
        return None
    if given == "balanced":
        return _balanced(names, counts)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            raise _weight_fault(unknown[0], names)
        return tuple(given.get(name, 1.0) for name in names)
    if len(given) != len(names):
        raise SettingsError(
            f"train.class_weights has {len(given)} weights for {len(names)} classes: "
            f"one each, in the order {list(names)}, or a mapping by their names"
        )
    return tuple(map(float, given))


def _balanced(names: Sequence[str], counts: Mapping[str, int]) -> tuple[float, ...]:
    """Return a weight for each class as in scikit-learn: the number of all rows divided
    by (number of classes * number of rows in the class)."""
    found = {name: counts.get(str(k), 0) for k, name in enumerate(names)}
    if not any(found.values()):
        raise SettingsError(
            "train.class_weights: balanced needs one class per row; give one weight "
            "per class, for example {a: 1.0, b: 2.5}"
        )
    if absent := [name for name, count in found.items() if not count]:
        raise SettingsError(
            f"train.class_weights: balanced needs train rows of every class; "
            f"{len(absent)} of {len(names)} have no row ({some_of(absent)}): give one "
            "weight per class, for example {a: 1.0, b: 2.5}"
        )
    rows = sum(found.values())
    return tuple(rows / (len(names) * count) for count in found.values())


def _weight_fault(name: str, names: Sequence[str]) -> SettingsError:
    near = near_or_all(name, names, "")
    if name in ("True", "False"):
        near += ". YAML reads yes and no as true and false: put them in quotes"
    return SettingsError(f"train.class_weights: no class is called {name!r}; {near}")


def _metric_fault(settings: Settings, task: type[Task]) -> str | None:
    name = settings.train.metric
    own = settings.train.compute_metrics is not None
    known = figures_of(settings.model, task)
    if name is None or own or name in known:
        return None
    near = near_or_all(name, known, "")
    return f"train.metric: {settings.model.task} has no metric {name!r}; {near}"


def _batch_fault(settings: Settings, task: type[Task]) -> str | None:
    if not task.whole_batch or settings.train.global_batch_size > 1:
        return None
    return (
        f"train.global_batch_size=1: {settings.model.task} compares the samples of a "
        "global batch with one another; set it to at least 2"
    )


def _predictions_fault(settings: Settings, task: type[Task]) -> str | None:
    if settings.train.compute_metrics is None:
        return None
    if task.head_kind not in (HeadKind.VOCABULARY, HeadKind.DIRECTIONS):
        return None
    return (
        f"train.compute_metrics: predictions of {settings.model.task} are a score for "
        "each piece of the vocabulary at each target, too large for the memory: give "
        "the task its own metrics (docs/own_task.md)"
    )
